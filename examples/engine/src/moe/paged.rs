//! The model over pikv: the code that an engine writes to use the library.

use crate::common::cache;
use pikv::{Attend, AttendOutput, Cache, Error, Sequence};

/// A cache with one sequence.
pub struct Paged {
    pub cache: Cache,
    pub sequence: Sequence,
    attend: Attend,
}

impl Paged {
    pub fn new(cache: Cache, head_dim: usize) -> Self {
        let sequence = cache.sequence();
        Self { cache, sequence, attend: Attend::new(1.0 / (head_dim as f32).sqrt()) }
    }
}

/// A step and its attention options.
pub struct Step<'a>(pub(super) pikv::Step<'a>, pub(super) Attend);

impl cache::Cache for Paged {
    type Error = Error;
    type Step<'a> = Step<'a>;

    fn begin(&mut self, n: usize) -> Result<Step<'_>, Error> {
        Ok(Step(self.cache.begin([(&mut self.sequence, n as u32)])?, self.attend))
    }

    fn len(&self) -> usize {
        self.sequence.next_position().0 as usize
    }

    fn clear(&mut self) {
        self.sequence.clear();
    }
}

impl cache::Step for Step<'_> {
    type Error = Error;

    fn layer(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), Error> {
        self.0.append(layer, k, v)?;
        self.0.attend(layer, q, &self.1, AttendOutput::new(out))
    }

    fn experts(&mut self, layer: usize, experts: &[u16]) -> Result<(), Error> {
        self.0.route(layer, experts)
    }

    fn commit(self) -> Result<(), Error> {
        self.0.commit()
    }
}
