//! Prompts beside the machine's peak of multiply-adds, measured in the same rounds.
//!
//! `cargo bench -p pikv-benches --bench prefill [-- --lanes NAME] [--form NAME] [--mode prompt|newest] [--rounds N] [--peer COMMAND]`
//!
//! One layer of 32 query heads over 8 KV heads of 128 channels, with a ring of 512 tokens: all rows of a causal prompt of 4,096 tokens, and
//! the newest 512 rows of 8,192. Each form is checked against a float64 softmax over what is stored before it is timed. A round measures
//! the peak of independent f32 multiply-adds and times each number of threads once; of the rounds the median counts. A row sees the
//! tokens up to its own, at `2 * head_dim` multiply-adds a token and query head; what they take at the peak is `peer_ms` in the rows of the
//! peer `peak`, and `share_of_peak` is that over `ours_ms`. `bf16 fast` is bf16 with `Attend::fast`, on lanes that multiply bf16: its share, too,
//! is of the peak of f32. With `--peer` another library takes turns in a process of its own (`benches/peers/prompts` starts PyTorch), and has rows
//! beside its time. `error` is the largest difference of the rows that were checked. Rows of `benches/results/prefill.csv` that were measured again on the same machine
//! are replaced, others stay.

#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;
#[path = "machine/peer.rs"]
mod peer;
#[allow(dead_code, reason = "the other benches use the rest")]
#[path = "attend/setup.rs"]
mod setup;

use machine::median;
use peer::Peer;
use pikv::AttendOutput;
use pikv::lanes::Lanes;
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
    peer: Option<Peer>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = arguments()?;
    let pools = THREADS.map(|n| ThreadPoolBuilder::new().num_threads(n).build());
    let pools = pools.into_iter().collect::<Result<Vec<_>, _>>()?;
    let end = machine::provenance(if options.peer.is_some() { "benches/peers/prompts" } else { COMMAND })?;
    println!("{} {}", machine::name(), options.lanes.name());
    println!(
        "{:>9} {:>7} {:>4} {:>20} {:>10} {:>10} {:>6} error",
        "form", "mode", "thr", "peer", "ms", "of it", "ratio"
    );
    let mut lines = Vec::new();
    let fast = options.lanes.multiplies_bf16().then(Form::fast);
    for form in Form::all().into_iter().chain(fast) {
        for (mode, n, context) in MODES {
            let wanted = |only: &Option<String>, name: &str| only.as_deref().is_none_or(|only| only == name);
            if !wanted(&options.form, form.name) || !wanted(&options.mode, mode) {
                continue;
            }
            for (threads, peer, ours, theirs, error) in rows_of(&mut options, &pools, &form, n, context)? {
                let (name, ratio) = (form.name, ours / theirs);
                let share = if peer == "peak" { format!("{:.3}", theirs / ours) } else { String::new() };
                let (ours, theirs) = (ours * 1e3, theirs * 1e3);
                println!(
                    "{name:>9} {mode:>7} {threads:>4} {peer:>20} {ours:>10.1} {theirs:>10.1} {ratio:>6.3} {error:.1e}"
                );
                lines.push(format!(
                    "{name},{mode},{n},{context},{threads},{peer},{ours:.2},{theirs:.2},{ratio:.3},{share},{error:.1e},{end}"
                ));
            }
        }
    }
    Ok(machine::replace_rows(PATH, COLUMNS, KEY, &lines)?)
}

/// Threads, the peer's name, seconds of ours and of the peer, and the largest error of ours.
type Measured = (usize, String, f64, f64, f64);

/// The rows of a form: beside the peak of multiply-adds, and beside the other library if there is one that has the form.
fn rows_of(
    options: &mut Options,
    pools: &[ThreadPool],
    form: &Form,
    n: u32,
    context: u32,
) -> Result<Vec<Measured>, Box<dyn Error>> {
    let cache = form.cache(options.lanes, n)?;
    let sequences = [grow(&cache, context)?];
    let (parts, q) = (rows(&sequences, n), queries(n as usize));
    let error = check(&cache, &parts, &q, form)?;
    let asked = format!("{} {n} {context}", form.name.trim_end_matches(" fast"));
    let mut peer = None;
    if let Some(other) = &mut options.peer
        && other.ask(&format!("setup {asked}"))?.starts_with("ok")
    {
        peer = Some(other);
    }
    let seen = f64::from(n) * (f64::from(context) - f64::from(n - 1) / 2.0);
    let products = seen * (2 * HEAD_DIM * QUERY_HEADS) as f64;
    let (mut out, mut samples) = (vec![0.0; q.len()], vec![[const { Vec::new() }; 3]; pools.len()]);
    for round in 0..=options.rounds {
        for (pool, [ours, peak, theirs]) in pools.iter().zip(&mut samples) {
            let fmas = pool.install(|| machine::fmas_per_s(options.lanes));
            let start = Instant::now();
            pool.install(|| cache.attend(0, &parts, &q, &form.options(), AttendOutput::new(&mut out)))?;
            let seconds = start.elapsed().as_secs_f64();
            let threads = pool.current_num_threads();
            let other =
                peer.as_mut().map(|peer| peer.ask(&format!("sample {asked} {threads}"))).transpose()?;
            // The first round warms up.
            if round > 0 {
                ours.push(seconds);
                peak.push(products / fmas);
                theirs.extend(other.map(|seconds| seconds.parse::<f64>()).transpose()?);
            }
        }
    }
    let name = peer.map(|peer| peer.name.clone());
    let mut all = Vec::new();
    for (pool, [ours, peak, theirs]) in pools.iter().zip(&samples) {
        let (threads, ours) = (pool.current_num_threads(), median(ours));
        all.push((threads, "peak".to_owned(), ours, median(peak), error));
        all.extend(name.clone().map(|name| (threads, name, ours, median(theirs), error)));
    }
    Ok(all)
}

fn arguments() -> Result<Options, Box<dyn Error>> {
    let mut options = Options { lanes: Lanes::detect(), form: None, mode: None, rounds: 9, peer: None };
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
            "--peer" => options.peer = Some(Peer::start(&value()?)?),
            other => {
                let all = "--lanes NAME, --form NAME, --mode NAME, --rounds N and --peer COMMAND";
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
