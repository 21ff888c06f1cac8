//! One of the peers of `benches/peers/run`: samples on request, a line each.
//!
//! `setup DTYPE CONTEXT` builds and checks, and answers `ok BYTES ERROR`. `sample DTYPE CONTEXT THREADS` answers
//! `seconds READ_GBPS FMAS_PER_S`; a peer that measures no limits answers the seconds alone.

use crate::machine::{self, Machine};
use crate::setup::{Form, check, grow, queries, rows};
use crate::timing;
use pikv::lanes::Lanes;
use pikv::{Cache, Sequence};
use std::collections::HashMap;
use std::error::Error;
use std::io::Write;
use std::time::Instant;

/// At least so long is a sample.
const SAMPLE_SECONDS: f64 = 0.03;

pub fn serve(lanes: Lanes) -> Result<(), Box<dyn Error>> {
    let mut built: HashMap<(String, u32), (Cache, [Sequence; 1])> = HashMap::new();
    let forms = Form::all();
    let q = queries(1);
    println!("{} {}|{}", env!("CARGO_PKG_VERSION"), lanes.name(), machine::name());
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["setup", dtype, context] => match forms.iter().find(|form| form.name == dtype) {
                None => println!("no {dtype} is not among the stored forms"),
                Some(form) => {
                    let context = context.parse()?;
                    let cache = form.cache(lanes, 1)?;
                    let sequences = [grow(&cache, context)?];
                    let error = check(&cache, &rows(&sequences, 1), &q, form)?;
                    println!("ok {} {error:e}", form.bytes(&sequences[0]));
                    built.insert((dtype.to_owned(), context), (cache, sequences));
                }
            },
            ["sample", dtype, context, threads] => {
                let key = (dtype.to_owned(), context.parse()?);
                let (cache, sequences) = built.get(&key).ok_or("sample before its setup")?;
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.parse()?).build()?;
                let (seconds, limits) = pool.install(|| {
                    Ok::<_, pikv::Error>((sample(cache, sequences, &q)?, Machine::measure(lanes)))
                })?;
                println!("{seconds:e} {} {:e}", limits.read_gbps, limits.fmas_per_s);
            }
            _ => return Err(format!("not a request: {line}").into()),
        }
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// The second half of a sample counts: the first warms up.
fn sample(cache: &Cache, sequences: &[Sequence; 1], q: &[f32]) -> Result<f64, pikv::Error> {
    let parts = rows(sequences, 1);
    let call = || timing::attend(cache, &parts, q);
    let start = Instant::now();
    let mut calls = 0;
    while calls == 0 || start.elapsed().as_secs_f64() < SAMPLE_SECONDS {
        call()?;
        calls += 1;
    }
    timing::seconds(calls, call)
}
