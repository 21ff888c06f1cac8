//! Samples of a call and of the machine's limits, taken in turn.

use crate::machine::{Machine, median};
use crate::setup::OPTIONS;
use pikv::lanes::Lanes;
use pikv::{AttendOutput, Cache, Rows};
use std::error::Error;
use std::time::Instant;

/// Samples of a configuration; fewer, if they took so many seconds.
const SAMPLES: usize = 9;
const FEWEST: usize = 5;
const PATIENCE: f64 = 4.0;
/// KV bytes of a sample, of all rows: a few milliseconds or more.
const SAMPLE_BYTES: f64 = 3e8;

/// Medians of a configuration.
pub struct Timing {
    /// Seconds a call.
    pub seconds: f64,
    /// Of the middle half of the samples, over the median, in percent.
    pub spread: f64,
    pub machine: Machine,
    /// Time over that of the other calls together, sample by sample.
    pub over_others: Option<f64>,
    /// Time over what its bytes take at the rate of the longest sequence alone; of a batch.
    pub over_sum: Option<f64>,
}

type Call<'a> = &'a (dyn Fn() -> Result<(), pikv::Error> + Sync);

impl Timing {
    /// `bytes` are what a call reads, over its rows.
    pub fn measure(
        lanes: Lanes,
        threads: usize,
        bytes: f64,
        others: &[Call<'_>],
        call: impl Fn() -> Result<(), pikv::Error> + Sync,
    ) -> Result<Timing, Box<dyn Error>> {
        let repeat = (SAMPLE_BYTES / bytes) as usize + 1;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        let (mut times, mut limits, mut over) = (Vec::new(), Vec::new(), Vec::new());
        let start = Instant::now();
        pool.install(|| -> Result<(), pikv::Error> {
            while times.len() < FEWEST || times.len() < SAMPLES && start.elapsed().as_secs_f64() < PATIENCE {
                let time = seconds(repeat, &call)?;
                let mut rest = 0.0;
                for other in others {
                    rest += seconds(repeat, other)?;
                }
                times.push(time);
                over.push(time / rest);
                limits.push(Machine::measure(lanes));
            }
            Ok(())
        })?;
        times.sort_by(f64::total_cmp);
        let (mid, cut) = (median(&times), times.len() / 4);
        let read: Vec<f64> = limits.iter().map(|m| m.read_gbps).collect();
        let fma: Vec<f64> = limits.iter().map(|m| m.fmas_per_s).collect();
        Ok(Timing {
            seconds: mid,
            spread: (times[times.len() - 1 - cut] - times[cut]) / mid * 100.0,
            machine: Machine { read_gbps: median(&read), fmas_per_s: median(&fma) },
            over_others: (!others.is_empty()).then(|| median(&over)),
            over_sum: None,
        })
    }
}

/// Seconds a call, over `repeat` of them.
pub fn seconds(repeat: usize, call: impl Fn() -> Result<(), pikv::Error>) -> Result<f64, pikv::Error> {
    let start = Instant::now();
    for _ in 0..repeat {
        call()?;
    }
    Ok(start.elapsed().as_secs_f64() / repeat as f64)
}

pub fn attend(cache: &Cache, parts: &[Rows<'_>], q: &[f32]) -> Result<(), pikv::Error> {
    let mut out = vec![0.0; q.len()];
    cache.attend(0, parts, q, &OPTIONS, AttendOutput::new(&mut out))?;
    std::hint::black_box(out);
    Ok(())
}
