//! A model over pikv that takes the time of its calls.

use crate::common::cache::{Cache as AnyCache, Step as AnyStep};
use crate::llama::rounding::Rounding;
use crate::moe::paged::{Paged, Step};
use pikv::{Cache, Error};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// A cache with one sequence, and the time spent in it.
pub struct Timed {
    pub paged: Paged,
    /// Forms of llama.cpp that K and V are rounded to before they are stored; rounding takes none of the time.
    pub rounded: Option<[Rounding; 2]>,
    /// Time of appends and attention.
    pub layers: Duration,
    /// Time of all other calls.
    pub others: Duration,
    clock: fn() -> Duration,
    /// Whether the cache files tokens by expert.
    files: bool,
}

impl Timed {
    /// `clock` is [`wall_time`] or [`cpu_time`](super::results::cpu_time).
    pub fn new(cache: Cache, head_dim: usize, clock: fn() -> Duration) -> Timed {
        let (files, none) = (cache.config().experts > 1, Duration::ZERO);
        let paged = Paged::new(cache, head_dim);
        Timed { paged, rounded: None, layers: none, others: none, clock, files }
    }
}

/// Time since the first call.
pub fn wall_time() -> Duration {
    static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
    FIRST.elapsed()
}

pub struct TimedStep<'a> {
    step: Step<'a>,
    rounded: Option<[Rounding; 2]>,
    layers: &'a mut Duration,
    others: &'a mut Duration,
    clock: fn() -> Duration,
    files: bool,
}

/// Adds the time of a call.
fn timed<T>(clock: fn() -> Duration, time: &mut Duration, call: impl FnOnce() -> T) -> T {
    let start = clock();
    let result = call();
    *time += clock() - start;
    result
}

impl AnyCache for Timed {
    type Error = Error;
    type Step<'a> = TimedStep<'a>;

    fn begin(&mut self, n: usize) -> Result<TimedStep<'_>, Error> {
        let Timed { paged, rounded, layers, others, clock, files } = self;
        let step = timed(*clock, others, || paged.begin(n))?;
        Ok(TimedStep { step, rounded: *rounded, layers, others, clock: *clock, files: *files })
    }

    fn len(&self) -> usize {
        self.paged.len()
    }

    fn clear(&mut self) {
        self.paged.clear();
    }
}

impl AnyStep for TimedStep<'_> {
    type Error = Error;

    fn layer(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), Error> {
        let rounded = self.rounded.map(|forms| {
            let mut both = [k.to_vec(), v.to_vec()];
            both.iter_mut().zip(forms).for_each(|(values, form)| form.round(values));
            both
        });
        let (k, v) = rounded.as_ref().map_or((k, v), |[k, v]| (k, v));
        timed(self.clock, self.layers, || self.step.layer(layer, q, k, v, out))
    }

    fn experts(&mut self, layer: usize, experts: &[u16]) -> Result<(), Error> {
        if !self.files {
            return Ok(());
        }
        timed(self.clock, self.others, || self.step.experts(layer, experts))
    }

    fn commit(self) -> Result<(), Error> {
        timed(self.clock, self.others, || self.step.commit())
    }
}
