//! Time of a decode step: `T = T0 + bytes / beta + flops / F`, with measured constants.

use super::error::PlanError;
use super::forecast::{Load, Planner, Work};
use crate::attend::options::{Attend, AttendOutput};
use crate::base::text::{Rate, Seconds, Table};
use crate::cache::Rows;
use crate::codec::Codec;
use crate::config::CacheConfig;
use pikv_core::dtype::Dtype;
use pikv_core::hash::next;
use pikv_core::page::{PAGE, Position};
use pikv_core::plan::LayerShape;
use pikv_lanes::Lanes;
use std::fmt;
use std::time::Instant;

/// A measured amount of work.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Sample {
    /// Work done.
    pub work: Work,
    /// Seconds taken.
    pub seconds: f64,
}

impl Sample {
    /// Work that took `seconds`.
    pub const fn new(work: Work, seconds: f64) -> Sample {
        Sample { work, seconds }
    }
}

/// The constants of `T = T0 calls + bytes / beta + flops / F`, for one machine, number of threads and stored form.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepTime {
    /// `T0`: constant seconds of a call.
    pub t0: f64,
    /// `beta`: bytes a second; infinite if time does not grow with bytes in the samples.
    pub beta: f64,
    /// `F`: floating-point operations a second; infinite if time does not grow with them in the samples.
    pub flops: f64,
    /// Root mean square of `(predicted - measured) / measured` over the samples.
    pub residual: f64,
    /// The largest magnitude of `(predicted - measured) / measured`.
    pub worst: f64,
}

impl fmt::Display for StepTime {
    /// A table of the constants with their units, and of the errors.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::default();
        table.row([&"T0, a call", &Seconds(self.t0)]);
        table.row([&"beta, reading", &Rate(self.beta, "B/s")]);
        table.row([&"F, computing", &Rate(self.flops, "flop/s")]);
        table.row([&"error, root mean square", &format_args!("{:.1} %", 100.0 * self.residual)]);
        table.row([&"error, largest", &format_args!("{:.1} %", 100.0 * self.worst)]);
        table.fmt(f)
    }
}

impl StepTime {
    /// Least squares of the relative error with constants of at least 0: solves every choice of terms exactly, and takes the best one
    /// without negative constants. If bytes and flops are proportional in all samples, one of the two terms is left out.
    ///
    /// # Errors
    /// [`PlanError::Samples`] for fewer than 3 samples, [`PlanError::Sample`] for one without calls or with a time that is not finite and
    /// above 0.
    pub fn fit(samples: &[Sample]) -> Result<StepTime, PlanError> {
        if samples.len() < 3 {
            return Err(PlanError::Samples { got: samples.len() });
        }
        for (index, &Sample { work: Work { calls, .. }, seconds }) in samples.iter().enumerate() {
            if calls == 0 || !(seconds.is_finite() && seconds > 0.0) {
                return Err(PlanError::Sample { index, calls, seconds });
            }
        }
        let rows: Vec<[f64; 3]> = samples
            .iter()
            .map(|s| [s.work.calls, s.work.bytes, s.work.flops].map(|x| x as f64 / s.seconds))
            .collect();
        let errors = |x: &[f64; 3]| -> Vec<f64> {
            rows.iter().map(|row| row.iter().zip(x).map(|(a, x)| a * x).sum::<f64>() - 1.0).collect()
        };
        let square = |x: &[f64; 3]| errors(x).iter().map(|e| e * e).sum::<f64>();
        // Fewer terms first: a term must improve the fit.
        let mut best = [0.0; 3];
        for terms in [1u8, 2, 4, 3, 5, 6, 7] {
            if let Some(x) = solve(&rows, terms)
                && x.iter().all(|x| *x >= 0.0)
                && square(&x) < square(&best) * (1.0 - 1e-9)
            {
                best = x;
            }
        }
        let off = errors(&best);
        Ok(StepTime {
            t0: best[0],
            beta: best[1].recip(),
            flops: best[2].recip(),
            residual: (square(&best) / rows.len() as f64).sqrt(),
            worst: off.iter().fold(0.0, |worst, e| e.abs().max(worst)),
        })
    }

    /// Seconds of `work`.
    pub fn seconds(&self, work: &Work) -> f64 {
        self.t0 * work.calls as f64 + work.bytes as f64 / self.beta + work.flops as f64 / self.flops
    }
}

/// The least-squares solution of `rows x = 1` over the columns in `terms`, the others 0; `None` if the columns are dependent.
fn solve(rows: &[[f64; 3]], terms: u8) -> Option<[f64; 3]> {
    let columns: Vec<usize> = (0..3).filter(|c| terms >> c & 1 == 1).collect();
    let dot = |a: usize, b: usize| rows.iter().map(|row| row[a] * row[b]).sum::<f64>();
    let norm = |c: usize| dot(c, c).sqrt();
    if columns.iter().any(|c| norm(*c) == 0.0) {
        return None;
    }
    // The normal equations with columns scaled to 1, reduced by rows; positive definite, so the diagonal is the pivot.
    let n = columns.len();
    let mut m = [[0.0; 4]; 3];
    for (i, a) in columns.iter().enumerate() {
        for (j, b) in columns.iter().enumerate() {
            m[i][j] = dot(*a, *b) / (norm(*a) * norm(*b));
        }
        m[i][n] = rows.iter().map(|row| row[*a]).sum::<f64>() / norm(*a);
    }
    for i in 0..n {
        let pivot = m[i];
        if pivot[i] < 1e-9 {
            return None;
        }
        for j in (0..n).filter(|j| *j != i) {
            let factor = m[j][i] / pivot[i];
            m[j].iter_mut().zip(pivot).for_each(|(x, p)| *x -= factor * p);
        }
    }
    let mut x = [0.0; 3];
    columns.iter().enumerate().for_each(|(i, c)| x[*c] = m[i][n] / m[i][i] / norm(*c));
    Some(x)
}

/// The shape and sizes to measure with.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Probe {
    /// Stored form of tokens that are not packed.
    pub dtype: Dtype,
    /// Codec of the other tokens.
    pub codec: Option<Codec>,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Lengths of sequences, in tokens.
    pub contexts: Vec<u32>,
    /// Query heads a KV head: they change the flops but not the bytes.
    pub groups: Vec<u32>,
    /// Fewest bytes read between two reads of a page; sets the number of layers. Choose more than the CPU's caches hold if that is so for
    /// the model's cache.
    pub working_set: u64,
    /// Runs of each measurement, of which the fastest counts, since other load only adds time.
    pub repeats: u32,
    /// Lanes to compute with.
    pub lanes: Lanes,
}

setters!(Probe {
    dtype: Dtype,
    kv_heads: u32,
    head_dim: u32,
    contexts: Vec<u32>,
    groups: Vec<u32>,
    working_set: u64,
    repeats: u32,
    lanes: Lanes,
} optional { codec: Codec });

impl Default for Probe {
    /// 8 KV heads of 128 channels in bf16; 1024, 8192 and 32768 tokens; 1, 4 and 8 query heads a KV head; 128 MiB; 5 runs.
    fn default() -> Probe {
        Probe {
            dtype: Dtype::Bf16,
            codec: None,
            kv_heads: 8,
            head_dim: 128,
            contexts: vec![1024, 8192, 32768],
            groups: vec![1, 4, 8],
            working_set: 128 << 20,
            repeats: 5,
            lanes: Lanes::detect(),
        }
    }
}

/// The samples of a measurement, and the constants fitted to them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Calibration {
    /// The constants.
    pub time: StepTime,
    /// The samples: one for each context and group, in that order.
    pub samples: Vec<Sample>,
    /// Threads available to attention.
    pub threads: usize,
}

/// Measures `T0`, `beta` and `F` on this machine, with the threads that attention would use if called from here: fits
/// [`StepTime`] to [`Probe::measure`] of every context and group.
///
/// # Errors
/// The errors of [`Probe::measure`]; [`PlanError::Samples`] for fewer than 3 pairs of context and group.
pub fn calibrate(probe: &Probe) -> Result<Calibration, PlanError> {
    let mut samples = Vec::new();
    for &context in &probe.contexts {
        for &group in &probe.groups {
            samples.push(probe.measure(context, group)?);
        }
    }
    #[cfg(feature = "rayon")]
    let threads = rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    let threads = 1;
    Ok(Calibration { time: StepTime::fit(&samples)?, samples, threads })
}

impl Probe {
    /// Fills a cache with constant noise, and attends one row of `context` tokens over all of its layers, as a decode step does, with
    /// `group` query heads a KV head. Takes about `working_set` bytes; filling takes most of the time.
    ///
    /// # Errors
    /// [`PlanError::Zero`] for a setting of 0, [`PlanError::Cache`] for heads that no cache accepts or for lack of memory.
    pub fn measure(&self, context: u32, group: u32) -> Result<Sample, PlanError> {
        let zero = |name, empty: bool| if empty { Err(PlanError::Zero { name }) } else { Ok(()) };
        zero("repeats", self.repeats == 0)?;
        zero("working_set", self.working_set == 0)?;
        zero("context", context == 0)?;
        let Probe { dtype, kv_heads, head_dim, .. } = *self;
        let query_heads = kv_heads.saturating_mul(group);
        let shape = LayerShape::new(kv_heads, query_heads, head_dim, dtype);
        let planner = |layers: usize| {
            let config = CacheConfig::new(vec![shape; layers], u64::MAX).ring(PAGE).lanes(self.lanes);
            Planner::new(match &self.codec {
                Some(codec) => config.compress(codec.clone()),
                None => config,
            })
        };
        let load = Load::new(context);
        let one = planner(1)?.forecast(&load)?.bytes;
        let layers = self.working_set.div_ceil(one) as usize;
        let planner = planner(layers)?;
        let work = planner.forecast(&load)?.work;
        let cache = planner.cache();
        let mut state = 1;
        let mut noise = || (next(&mut state) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        const CHUNK: u32 = 256;
        let width = (kv_heads * head_dim) as usize;
        let (k, v): (Vec<f32>, Vec<f32>) = (0..CHUNK as usize * width).map(|_| (noise(), noise())).unzip();
        let q: Vec<f32> = (0..width * group as usize).map(|_| noise()).collect();
        let mut sequence = cache.sequence();
        for first in (0..context).step_by(CHUNK as usize) {
            let n = CHUNK.min(context - first);
            let mut step = cache.begin([(&mut sequence, n)])?;
            for layer in 0..layers {
                step.append(layer, &k[..n as usize * width], &v[..n as usize * width])?;
            }
            step.commit()?;
        }
        let rows = [Rows { sequence: &sequence, first: Position(context - 1), rows: 1 }];
        let options = Attend::new((head_dim as f32).sqrt().recip());
        let mut out = vec![0.0; q.len()];
        let mut seconds = f64::INFINITY;
        // The first run is not counted: caches are still as the writes left them.
        for run in 0..=self.repeats {
            let start = Instant::now();
            for layer in 0..layers {
                cache.attend(layer, &rows, &q, &options, AttendOutput::new(&mut out))?;
            }
            if run > 0 {
                seconds = start.elapsed().as_secs_f64().min(seconds);
            }
        }
        Ok(Sample { work, seconds })
    }
}
