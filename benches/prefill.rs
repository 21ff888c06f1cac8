//! Prompts beside the machine's peak of multiply-adds, measured in the same rounds.
//!
//! `cargo bench -p pikv-benches --bench prefill [-- --lanes NAME] [--form NAME] [--mode prompt|newest] [--rounds N]`
//!
//! One layer of 32 query heads over 8 KV heads of 128 channels, with a ring of 512 tokens: all rows of a causal prompt of 4,096 tokens, and
//! the newest 512 rows of 8,192. Each form is checked against a float64 softmax over what is stored before it is timed. A round measures
//! the peak of independent f32 multiply-adds and times each number of threads once; of the rounds the median counts. A row sees the
//! tokens up to its own, at `2 * head_dim` multiply-adds a token and query head; what they take at the peak is `peer_ms` in the rows of the
//! peer `peak`, and `share_of_peak` is that over `ours_ms`. `bf16 fast` is bf16 with `Attend::fast`, on lanes that multiply bf16: its share, too,
//! is of the peak of f32. `error` is the largest difference of the rows that were checked. Rows of `benches/results/prefill.csv` that were measured again on the same machine
//! are replaced, others stay.

#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;
#[allow(dead_code, reason = "the other benches use the rest")]
#[path = "attend/setup.rs"]
mod setup;

use machine::median;
use pikv::lanes::Lanes;
use pikv::{AttendOutput, Cache, Rows};
use rayon::{ThreadPool, ThreadPoolBuilder};
use setup::{Form, check, grow, queries, rows};
use std::error::Error;
use std::time::Instant;

const HEAD_DIM: usize = 128;
const KV_HEADS: usize = 8;
const QUERY_HEADS: usize = 32;
const THREADS: [usize; 2] = [1, 2];
/// Name, rows and context.
const MODES: [(&str, u32, u32); 2] = [("prompt", 4096, 4096), ("newest", 512, 8192)];
const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/results/prefill.csv");
const COLUMNS: &str = "form,mode,rows,context,threads,peer,ours_ms,peer_ms,ratio,share_of_peak,error,machine,date,commit,command";
const COMMAND: &str = "cargo bench -p pikv-benches --bench prefill";
/// Columns of a configuration: form to peer, and the machine.
const KEY: [usize; 7] = [0, 1, 2, 3, 4, 5, 11];

struct Options {
    lanes: Lanes,
    form: Option<String>,
    mode: Option<String>,
    rounds: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = arguments()?;
    let pools = THREADS.map(|n| ThreadPoolBuilder::new().num_threads(n).build());
    let pools = pools.into_iter().collect::<Result<Vec<_>, _>>()?;
    let end = machine::provenance(COMMAND)?;
    println!("{} {}", machine::name(), options.lanes.name());
    println!("{:>9} {:>7} {:>4} {:>10} {:>10} {:>6} error", "form", "mode", "thr", "ms", "at peak", "share");
    let mut lines = Vec::new();
    let fast = options.lanes.multiplies_bf16().then(Form::fast);
    for form in Form::all().into_iter().chain(fast) {
        for (mode, n, context) in MODES {
            let wanted = |only: &Option<String>, name: &str| only.as_deref().is_none_or(|only| only == name);
            if !wanted(&options.form, form.name) || !wanted(&options.mode, mode) {
                continue;
            }
            let cache = form.cache(options.lanes, n)?;
            let sequences = [grow(&cache, context)?];
            let (parts, q) = (rows(&sequences, n), queries(n as usize));
            let error = check(&cache, &parts, &q, &form)?;
            let seen = f64::from(n) * (f64::from(context) - f64::from(n - 1) / 2.0);
            let products = seen * (2 * HEAD_DIM * QUERY_HEADS) as f64;
            for (threads, (ours, peak)) in
                THREADS.iter().zip(measure(&options, &pools, &cache, &form, &parts, &q)?)
            {
                let at_peak = products / peak;
                let share = at_peak / ours;
                let name = form.name;
                let (ours, at_peak) = (ours * 1e3, at_peak * 1e3);
                println!(
                    "{name:>9} {mode:>7} {threads:>4} {ours:>10.1} {at_peak:>10.1} {share:>6.3} {error:.1e}"
                );
                let ratio = ours / at_peak;
                lines.push(format!(
                    "{name},{mode},{n},{context},{threads},peak,{ours:.2},{at_peak:.2},{ratio:.3},{share:.3},{error:.1e},{end}"
                ));
            }
        }
    }
    Ok(machine::replace_rows(PATH, COLUMNS, KEY, &lines)?)
}

/// Seconds of a call and multiply-adds a second, medians over the rounds, for each number of threads.
fn measure(
    options: &Options,
    pools: &[ThreadPool],
    cache: &Cache,
    form: &Form,
    parts: &[Rows<'_>],
    q: &[f32],
) -> Result<Vec<(f64, f64)>, pikv::Error> {
    let mut out = vec![0.0; q.len()];
    let mut samples = vec![(Vec::new(), Vec::new()); pools.len()];
    for round in 0..=options.rounds {
        for (pool, (ours, peak)) in pools.iter().zip(&mut samples) {
            let fmas = pool.install(|| machine::fmas_per_s(options.lanes));
            let start = Instant::now();
            pool.install(|| cache.attend(0, parts, q, &form.options(), AttendOutput::new(&mut out)))?;
            let seconds = start.elapsed().as_secs_f64();
            // The first round warms up.
            if round > 0 {
                ours.push(seconds);
                peak.push(fmas);
            }
        }
    }
    Ok(samples.iter().map(|(ours, peak)| (median(ours), median(peak))).collect())
}

fn arguments() -> Result<Options, Box<dyn Error>> {
    let mut options = Options { lanes: Lanes::detect(), form: None, mode: None, rounds: 9 };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} wants a value"));
        match argument.as_str() {
            // Cargo's own.
            "--bench" => {}
            "--lanes" => options.lanes = Lanes::by_name(&value()?)?,
            "--form" => options.form = Some(value()?),
            "--mode" => options.mode = Some(value()?),
            "--rounds" => options.rounds = value()?.parse()?,
            other => {
                let all = "--lanes NAME, --form NAME, --mode NAME and --rounds N";
                return Err(format!("{other}: options are {all}").into());
            }
        }
    }
    let mut forms: Vec<_> = Form::all().iter().map(|form| form.name).collect();
    forms.extend(options.lanes.multiplies_bf16().then(|| Form::fast().name));
    let modes = MODES.map(|(mode, ..)| mode);
    for (option, only, all) in [("form", &options.form, &forms[..]), ("mode", &options.mode, &modes[..])] {
        if let Some(only) = only.as_deref().filter(|only| !all.contains(only)) {
            return Err(format!("--{option} {only}: there are {}", all.join(", ")).into());
        }
    }
    if options.rounds == 0 {
        return Err("--rounds 0: at least 1 is wanted".into());
    }
    Ok(options)
}
