//! pikv with a row's configuration, and its time.

use crate::rows::Row;
use pikv::{Cache, CacheConfig};
use pikv_engine::common::cache::{Cache as AnyCache, Step as AnyStep};
use pikv_engine::llama::rounding::Rounding;
use pikv_engine::measure::results::cpu_time;
use pikv_engine::measure::subject::Subject;
use pikv_engine::moe::paged::Paged;
use std::error::Error;
use std::time::Duration;

/// pikv over `subject` with a row's configuration.
pub fn paged(subject: &Subject, row: &Row, sinks: u32) -> Result<Paged, Box<dyn Error>> {
    let layers = vec![subject.layer(row.dtype, row.keys); subject.layers];
    let config = CacheConfig::new(layers, 4 << 30).ring(row.ring as u32).sinks(sinks);
    let config = match row.by_expert {
        true => config.experts(subject.experts.0, subject.experts.1),
        false => config,
    };
    Ok(Paged::new(Cache::new(row.drop(row.compress(config)))?, subject.head_dim))
}

/// A cache that measures the CPU time of appends and attention.
pub struct Timed {
    paged: Paged,
    time: Duration,
    /// Whether tokens are filed by expert.
    by_expert: bool,
    /// [`Row::rounded`]
    rounded: Option<[Rounding; 2]>,
}

impl Timed {
    pub fn new(paged: Paged, row: &Row) -> Timed {
        Timed { paged, time: Duration::ZERO, by_expert: row.by_expert, rounded: row.rounded }
    }

    pub fn time(&self) -> Duration {
        self.time
    }

    pub fn bytes(&self) -> u64 {
        self.paged.sequence.bytes()
    }

    /// Share of the tokens that left the ring, without sinks, that is held.
    pub fn kept(&self) -> Result<f64, pikv::Error> {
        let (config, sequence) = (self.paged.cache.config(), &self.paged.sequence);
        let (mut held, mut all) = (0, 0);
        for (layer, shape) in config.layers.iter().enumerate() {
            let fixed = sequence.in_ring().0 + self.paged.cache.store(layer)?.sinks;
            let left = sequence.next_position().0.saturating_sub(fixed);
            for head in 0..shape.kv_heads as usize {
                held += u64::from(sequence.resident(layer, head)?.0.saturating_sub(fixed));
                all += u64::from(left);
            }
        }
        Ok(if all == 0 { 1.0 } else { held as f64 / all as f64 })
    }

    /// bf16 bytes of the tokens of packed pages over the bytes of those pages.
    pub fn packed(&self) -> Result<f64, pikv::Error> {
        let (mut raw, mut packed) = (0, 0);
        for (layer, shape) in self.paged.cache.config().layers.iter().enumerate() {
            let token = 2 * u64::from(shape.layout.k_dim + shape.layout.v_dim);
            for head in 0..shape.kv_heads as usize {
                for page in self.paged.sequence.pages(layer, head)?.filter(|page| page.packed) {
                    raw += token * u64::from(page.tokens);
                    packed += page.bytes;
                }
            }
        }
        Ok(raw as f64 / packed as f64)
    }

    pub fn clear(&mut self) {
        self.paged.sequence.clear();
    }
}

/// A step, and what [`Timed`] says of it.
pub struct TimedStep<'a> {
    step: <Paged as AnyCache>::Step<'a>,
    time: &'a mut Duration,
    by_expert: bool,
    rounded: Option<[Rounding; 2]>,
}

impl AnyCache for Timed {
    type Error = pikv::Error;
    type Step<'a> = TimedStep<'a>;

    fn begin(&mut self, n: usize) -> std::result::Result<TimedStep<'_>, pikv::Error> {
        let Timed { paged, time, by_expert, rounded } = self;
        Ok(TimedStep { step: paged.begin(n)?, time, by_expert: *by_expert, rounded: *rounded })
    }

    fn len(&self) -> usize {
        self.paged.len()
    }

    fn clear(&mut self) {
        Timed::clear(self);
    }
}

impl AnyStep for TimedStep<'_> {
    type Error = pikv::Error;

    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> std::result::Result<(), pikv::Error> {
        let rounded = self.rounded.map(|forms| {
            let mut both = [k.to_vec(), v.to_vec()];
            both.iter_mut().zip(forms).for_each(|(values, form)| form.round(values));
            both
        });
        let (k, v) = rounded.as_ref().map_or((k, v), |[k, v]| (k, v));
        let start = cpu_time();
        let result = self.step.layer(layer, q, k, v, out);
        *self.time += cpu_time() - start;
        result
    }

    fn experts(&mut self, layer: usize, experts: &[u16]) -> std::result::Result<(), pikv::Error> {
        if self.by_expert { self.step.experts(layer, experts) } else { Ok(()) }
    }

    fn commit(self) -> std::result::Result<(), pikv::Error> {
        self.step.commit()
    }
}
