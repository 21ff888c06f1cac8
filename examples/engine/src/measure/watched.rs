//! A model over pikv that reports the attention mass of each page.

use crate::common::cache::{Cache as AnyCache, Step as AnyStep};
use pikv::report::PageMass;
use pikv::{Attend, AttendOutput, Cache, Error, Sequence};

/// Receives attention masses.
pub trait Watch {
    /// Whether a layer is watched.
    fn layer(&self, layer: usize) -> bool;
    /// Masses of the pages of a watched layer in a step whose first token is at `first`.
    fn mass(&mut self, layer: usize, first: u32, mass: &[PageMass]);
    /// Receives the experts chosen by the model's router.
    fn experts(&mut self, _layer: usize, _experts: &[u16]) {}
}

/// A cache, one of its sequences, and a receiver.
pub struct Watched<W> {
    pub watch: W,
    cache: Cache,
    sequence: Sequence,
    attend: Attend,
}

impl<W> Watched<W> {
    pub fn new(cache: Cache, head_dim: usize, watch: W) -> Watched<W> {
        let attend = Attend::new(1.0 / (head_dim as f32).sqrt());
        Watched { watch, sequence: cache.sequence(), cache, attend }
    }
}

pub struct Step<'a, W> {
    step: pikv::Step<'a>,
    watch: &'a mut W,
    attend: Attend,
    first: u32,
    /// Whether the cache files tokens by expert.
    files: bool,
}

impl<W: Watch> AnyCache for Watched<W> {
    type Error = Error;
    type Step<'a>
        = Step<'a, W>
    where
        W: 'a;

    fn begin(&mut self, n: usize) -> Result<Step<'_, W>, Error> {
        let (first, files) = (self.sequence.next_position().0, self.cache.config().experts > 1);
        let step = self.cache.begin([(&mut self.sequence, n as u32)])?;
        Ok(Step { step, watch: &mut self.watch, attend: self.attend, first, files })
    }

    fn len(&self) -> usize {
        self.sequence.next_position().0 as usize
    }

    fn clear(&mut self) {
        self.sequence.clear();
    }
}

impl<W: Watch> AnyStep for Step<'_, W> {
    type Error = Error;

    fn layer(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), Error> {
        self.step.append(layer, k, v)?;
        if !self.watch.layer(layer) {
            return self.step.attend(layer, q, &self.attend, AttendOutput::new(out));
        }
        let mut mass = Vec::new();
        self.step.attend(layer, q, &self.attend, AttendOutput::new(out).mass(&mut mass))?;
        self.watch.mass(layer, self.first, &mass);
        Ok(())
    }

    fn experts(&mut self, layer: usize, experts: &[u16]) -> Result<(), Error> {
        self.watch.experts(layer, experts);
        if self.files { self.step.route(layer, experts) } else { Ok(()) }
    }

    fn commit(self) -> Result<(), Error> {
        self.step.commit()
    }
}
