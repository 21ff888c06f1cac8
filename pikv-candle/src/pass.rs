//! Sequences of a batch, and the step of a model's pass.

use crate::Error;
use crate::tensors::Given;
use pikv::{Cache, Sequence, Step};
use self_cell::{MutBorrow, self_cell};
use std::fmt;

/// A step; `None` after its commit.
type Under<'a> = Option<Step<'a>>;

self_cell!(
    /// A step, with the sequences that it borrows.
    struct Stepping {
        owner: MutBorrow<Vec<Sequence>>,
        #[covariant]
        dependent: Under,
    }
);

/// State of a pass.
pub struct Pass {
    of: Given,
    stepping: Stepping,
    appended: Vec<bool>,
    routed: Vec<bool>,
}

/// The sequences of a batch, between passes or in a pass.
#[derive(Debug)]
pub enum Held {
    Rest(Vec<Sequence>),
    Open(Pass),
}

impl Default for Held {
    fn default() -> Held {
        Held::Rest(Vec::new())
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pass { of, stepping, appended, routed } = self;
        f.debug_struct("Pass")
            .field("of", of)
            .field("step", stepping.borrow_dependent())
            .field("appended", appended)
            .field("routed", routed)
            .finish()
    }
}

impl Held {
    /// The sequences, without the tokens of an unfinished pass.
    pub fn rest(&mut self) -> &mut Vec<Sequence> {
        if let Held::Open(_) = self
            && let Held::Open(pass) = std::mem::take(self)
        {
            // Drops its step.
            *self = Held::Rest(pass.stepping.into_owner().into_inner());
        }
        match self {
            Held::Rest(sequences) => sequences,
            Held::Open(_) => unreachable!("it was closed above"),
        }
    }

    /// Calls `f`, and undoes the pass if it fails.
    pub fn in_pass<T>(&mut self, f: impl FnOnce(&mut Held) -> Result<T, Error>) -> Result<T, Error> {
        let done = f(self);
        if done.is_err() {
            self.rest();
        }
        done
    }

    /// Continues the unfinished pass, or begins one if that has attended the layer already or has another number of tokens.
    pub fn enter(&mut self, cache: &Cache, of: Given, layer: usize) -> Result<(), Error> {
        match self {
            Held::Open(pass) if pass.of == of && !pass.appended[layer] => Ok(()),
            _ => self.begin(cache, of),
        }
    }

    /// Calls `f` with the step of the current pass.
    pub fn step<T>(&mut self, f: impl FnOnce(&mut Step<'_>) -> Result<T, Error>) -> Result<T, Error> {
        let Held::Open(pass) = self else { unreachable!("a pass was entered") };
        pass.stepping.with_dependent_mut(|_, step| match step {
            Some(step) => f(step),
            None => unreachable!("a pass ends with its commit"),
        })
    }

    fn begin(&mut self, cache: &Cache, of: Given) -> Result<(), Error> {
        let sequences = self.rest();
        if sequences.len() != of.batch {
            // Before the first commit a batch has no fixed number of sequences.
            if sequences.iter().any(|sequence| sequence.next_position().0 > 0) {
                return Err(Error::Batch { got: of.batch, held: sequences.len() });
            }
            sequences.clear();
            sequences.resize_with(of.batch, || cache.sequence());
        }
        let tokens = u32::try_from(of.tokens).unwrap_or(u32::MAX);
        let sequences = MutBorrow::new(std::mem::take(sequences));
        let begun = Stepping::try_new_or_recover(sequences, |sequences| {
            let parts = sequences.borrow_mut().iter_mut().map(|sequence| (sequence, tokens));
            cache.begin(parts).map(Some)
        });
        match begun {
            Ok(stepping) => {
                let layers = cache.config().layers.len();
                let routed = vec![cache.config().experts == 1; layers];
                *self = Held::Open(Pass { of, stepping, appended: vec![false; layers], routed });
                Ok(())
            }
            Err((sequences, error)) => {
                *self = Held::Rest(sequences.into_inner());
                Err(error.into())
            }
        }
    }

    /// Rows of the current pass, if it has attended and not yet routed the layer.
    pub fn attended(&self, layer: usize) -> Result<usize, Error> {
        match self {
            Held::Open(pass) if pass.appended.get(layer) == Some(&true) && !pass.routed[layer] => {
                Ok(pass.of.batch * pass.of.tokens)
            }
            _ => Err(Error::NotAttended { layer }),
        }
    }

    /// Records that a layer is attended; commits the step if all layers are complete.
    pub fn appended(&mut self, layer: usize) -> Result<(), Error> {
        if let Held::Open(pass) = self {
            pass.appended[layer] = true;
        }
        self.finish()
    }

    /// Records that a layer is routed; like [`Held::appended`].
    pub fn routed(&mut self, layer: usize) -> Result<(), Error> {
        if let Held::Open(pass) = self {
            pass.routed[layer] = true;
        }
        self.finish()
    }

    fn finish(&mut self) -> Result<(), Error> {
        let Held::Open(pass) = self else { return Ok(()) };
        if !pass.appended.iter().chain(&pass.routed).all(|done| *done) {
            return Ok(());
        }
        let done = pass.stepping.with_dependent_mut(|_, step| step.take().map_or(Ok(()), Step::commit));
        self.rest();
        Ok(done?)
    }
}
