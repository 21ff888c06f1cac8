//! KV cache bytes of known MoE models, and the predicted time of a decode step on this machine.
//!
//! `cargo run --release -p pikv-examples --bin plan [-- --model NAME] [--device-mib N]`
//!
//! Bytes are as the allocator takes them, on the fullest of 1 and of 8 devices. With `--device-mib`, rows that do not fit on each of 8
//! devices are marked, with what would fit. Step times use constants measured first on this machine; they cover attention alone, with all
//! pages on this machine. The paper's figures follow its formulas, which do not know a token budget: for that row they are the figures of
//! the whole cache.

use pikv::codec::{Code, Codec, Coding};
use pikv::planner::paper::{self, Latency, Memory};
use pikv::planner::{Forecast, Geometry, Load, Planner, Probe, StepTime, calibrate};
use pikv::shard::ShardMap;
use pikv::{CacheConfig, Dtype};
use std::error::Error;

const CONTEXTS: [u32; 3] = [4 << 10, 32 << 10, 128 << 10];
const DEVICES: [u32; 2] = [1, 8];
const RING: u32 = 256;
/// The paper's K: resident pages of a device.
const PAGES: f64 = 16.0;

/// A storage form of the cache.
struct Form {
    name: &'static str,
    codec: Option<Codec>,
    /// Percent of the tokens that are kept.
    share: u32,
}

impl Form {
    fn all() -> [Form; 4] {
        let code = |code| Some(Codec::new(Coding::new(code), Coding::new(code)));
        [
            Form { name: "bf16", codec: None, share: 100 },
            Form { name: "int8", codec: code(Code::Int8), share: 100 },
            Form { name: "int4", codec: code(Code::Int4), share: 100 },
            Form { name: "bf16, 25 % of tokens", codec: None, share: 25 },
        ]
    }

    fn ratio(&self, geometry: &Geometry) -> f64 {
        self.codec.as_ref().map_or(1.0, |codec| codec.ratio(geometry.head_dim, geometry.head_dim))
    }

    fn planner(&self, geometry: &Geometry, devices: u32, budget: u64) -> Result<Planner, Box<dyn Error>> {
        let config = geometry.config(Dtype::Bf16, Dtype::Bf16, budget);
        let config: CacheConfig = config.ring(RING).sinks(4).shards(ShardMap::sum(devices)?);
        Ok(Planner::new(match &self.codec {
            Some(codec) => config.compress(codec.clone()),
            None => config,
        })?)
    }

    fn load(&self, len: u32) -> Load {
        let load = Load::new(len);
        if self.share < 100 {
            load.resident((u64::from(len) * u64::from(self.share) / 100) as u32)
        } else {
            load
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (models, device) = arguments()?;
    let forms = Form::all();
    println!("measuring this machine ...");
    let mut times: Vec<StepTime> = Vec::new();
    for form in &forms[..3] {
        let mut probe = Probe::default();
        probe.codec = form.codec.clone();
        let calibration = calibrate(&probe)?;
        let time = calibration.time;
        println!(
            "{:5} T0 {:7.1} us a layer, beta {}, F {}; {} threads; off by {:.0} % (root mean square), {:.0} % at most",
            form.name,
            time.t0 * 1e6,
            rate(time.beta, "GB/s"),
            rate(time.flops, "GFLOP/s"),
            calibration.threads,
            time.residual * 100.0,
            time.worst * 100.0
        );
        // A context and a group size that the constants were not fitted to.
        let other = probe.measure(16384, 2)?;
        println!(
            "{:7}16384 tokens, 2 query heads a KV head: {} predicted, {} measured",
            "",
            duration(time.seconds(&other.work)),
            duration(other.seconds)
        );
        times.push(time);
    }
    times.push(times[0]);
    for geometry in &models {
        table(geometry, &forms, &times, device)?;
    }
    println!(
        "\nstep: attention of one token over all layers, on this machine, by the constants above; not of any other machine.\n\
         M*: the paper's least memory on a device with {PAGES} resident pages, times layers, KV heads and 2 bytes; it leaves\n\
         out where the other tokens are. S*: the page size at which that is. T_step: the paper's formula, with beta and F of\n\
         this machine and 2 operations an element; it has no length in it."
    );
    Ok(())
}

fn table(geometry: &Geometry, forms: &[Form], times: &[StepTime], device: u64) -> Result<(), Box<dyn Error>> {
    let Geometry { name, layers, query_heads, kv_heads, head_dim, experts, top_k, max_context, .. } =
        *geometry;
    println!(
        "\n{name}: {layers} layers, {query_heads}/{kv_heads} heads of {head_dim}, {top_k} of {experts} experts, \
         {max_context} tokens"
    );
    println!(
        "{:>7}  {:21} {:>10} {:>10} {:>9}   {:>10} {:>10} {:>11} {:>9}",
        "tokens", "stored as", "1 device", "each of 8", "step", "M*, 1", "M*, 8", "S* (1; 8)", "T_step"
    );
    let mut contexts = CONTEXTS.map(|len| len.min(max_context)).to_vec();
    contexts.dedup();
    for len in contexts {
        for (form, time) in forms.iter().zip(times) {
            let mut fullest = [0; 2];
            let mut seconds = 0.0;
            for (fullest, devices) in fullest.iter_mut().zip(DEVICES) {
                let Forecast { shards, work, .. } =
                    form.planner(geometry, devices, u64::MAX)?.forecast(&form.load(len))?;
                *fullest = shards.into_iter().max().unwrap_or(0);
                seconds = time.seconds(&work);
            }
            let memory = |devices| Memory {
                width: head_dim.into(),
                ratio: form.ratio(geometry),
                tokens: len.into(),
                devices,
                pages: PAGES,
            };
            let least = |devices| paper::m_star(&memory(devices)) * f64::from(layers * kv_heads) * 2.0;
            let latency = Latency {
                width: head_dim.into(),
                top_k: top_k.into(),
                batch: 1.0,
                ratio: form.ratio(geometry),
                beta: time.beta / 2.0,
                eta: 2.0,
                gamma: time.flops,
            };
            println!(
                "{len:>7}  {:21} {:>10} {:>10} {:>9}   {:>10} {:>10} {:>11} {:>9}",
                form.name,
                mib(fullest[0] as f64),
                mib(fullest[1] as f64),
                duration(seconds),
                mib(least(1.0)),
                mib(least(8.0)),
                format!("{:.1}; {:.1}", paper::s_star(&memory(1.0)), paper::s_star(&memory(8.0))),
                duration(paper::t_step(&latency)),
            );
            if fullest[1] > device {
                // This map fills its shards evenly.
                match form.planner(geometry, 8, device.saturating_mul(8))?.check(&form.load(len)) {
                    Err(error) => println!("{:>9}{error}", ""),
                    Ok(_) => println!("{:>9}fits in all 8 devices, not in the fullest", ""),
                }
            }
        }
    }
    Ok(())
}

fn mib(bytes: f64) -> String {
    format!("{:.1} MiB", bytes / f64::from(1 << 20))
}

fn duration(seconds: f64) -> String {
    if seconds < 1e-3 { format!("{:.1} us", seconds * 1e6) } else { format!("{:.1} ms", seconds * 1e3) }
}

/// A rate, or "not seen" if the measured time does not depend on it.
fn rate(per_second: f64, unit: &str) -> String {
    if per_second.is_finite() {
        format!("{:.1} {unit}", per_second / 1e9)
    } else {
        format!("not seen ({unit})")
    }
}

fn arguments() -> Result<(Vec<Geometry>, u64), Box<dyn Error>> {
    let (mut models, mut device) = (Geometry::ALL.to_vec(), u64::MAX);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().unwrap_or_default();
        match argument.as_str() {
            "--model" => {
                models.retain(|model| model.name.eq_ignore_ascii_case(&value));
                if models.is_empty() {
                    let names = Geometry::ALL.map(|model| model.name).join(", ");
                    return Err(format!("no model named {value:?}; there are {names}").into());
                }
            }
            "--device-mib" => {
                let mib: u64 = value.parse().map_err(|_| {
                    format!("--device-mib {value:?}; it must be a whole number of MiB, as 81920")
                })?;
                device = mib.saturating_mul(1 << 20);
            }
            other => return Err(format!("{other}: options are --model NAME and --device-mib N").into()),
        }
    }
    Ok((models, device))
}
