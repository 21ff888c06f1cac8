//! A model over pikv with several sequences in a step: chunks of prompts and single tokens together.

use super::paged::Step;
use crate::common::cache;
use pikv::{Attend, Cache, Error, Sequence};

/// Sequences of one step.
pub struct Batch<'a> {
    cache: &'a Cache,
    parts: Vec<(&'a mut Sequence, u32)>,
    /// Position of each row.
    positions: Vec<usize>,
    attend: Attend,
}

impl<'a> Batch<'a> {
    /// A batch of sequences of `cache`, each with its number of new tokens, in the order of the model's rows.
    pub fn new(cache: &'a Cache, parts: Vec<(&'a mut Sequence, u32)>, head_dim: usize) -> Self {
        let positions = |(sequence, n): &(&mut Sequence, u32)| {
            let first = sequence.next_position().0 as usize;
            first..first + *n as usize
        };
        let positions = parts.iter().flat_map(positions).collect();
        Batch { cache, parts, positions, attend: Attend::new((head_dim as f32).sqrt().recip()) }
    }
}

impl cache::Cache for Batch<'_> {
    type Error = Error;
    type Step<'s>
        = Step<'s>
    where
        Self: 's;

    fn begin(&mut self, _rows: usize) -> Result<Step<'_>, Error> {
        let parts = self.parts.iter_mut().map(|(sequence, n)| (&mut **sequence, *n));
        Ok(Step(self.cache.begin(parts)?, self.attend))
    }

    fn len(&self) -> usize {
        self.positions.first().copied().unwrap_or(0)
    }

    fn position(&self, row: usize) -> usize {
        self.positions[row]
    }

    fn clear(&mut self) {
        self.parts.iter_mut().for_each(|(sequence, _)| sequence.clear());
    }
}
