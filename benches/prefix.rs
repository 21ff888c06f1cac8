//! Bytes of forks of a sealed prompt, and the time of a look-up in a prefix index.
//!
//! `cargo bench -p pikv-benches --bench prefix [-- --quick]`
//!
//! *Bytes*: a sequence of `prompt` tokens is sealed and forked 8 times, and each fork gets 512 tokens of its own. `ideal` is what pages of
//! the prompt once and of all own tokens take, `ratio` the bytes in use over that. `each` is what is left in the first tier after a
//! `demote` of each of them in turn, `together` after one of all. One layer, one head of 64 channels in bf16, one expert.
//!
//! *Look-ups*: of a prompt of 8,192 tokens in one layer, known but for its last tokens and not known at all, as nanoseconds a token of the
//! prompt, the median of 200. The fork that a look-up gives is part of it.
//!
//! The results of a whole run go to `benches/results/prefix.csv` and `benches/results/lookups.csv`.

#[allow(dead_code, reason = "the limits are for other benches")]
mod machine;

use machine::median;
use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::tiers::Tiers;
use pikv::{Cache, CacheConfig, Dtype, LayerShape, Sequence};
use std::error::Error;
use std::fmt::Write;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const DIM: usize = 64;
const RING: u32 = 256;
const FORKS: usize = 8;
const OWN: usize = 512;

fn cache() -> Result<Cache> {
    let layer = LayerShape::new(1, 1, DIM as u32, Dtype::Bf16);
    Ok(Cache::new(CacheConfig::new(vec![layer], 1 << 30).ring(RING).tiers(Tiers::new().host(1 << 30)))?)
}

/// Adds tokens, the same to each.
fn add(cache: &Cache, sequences: &mut [Sequence], mut tokens: usize) -> Result<()> {
    while tokens > 0 {
        let n = tokens.min(RING as usize);
        let values: Vec<f32> = machine::noise(tokens as u64).take(sequences.len() * n * DIM).collect();
        let mut step = cache.begin(sequences.iter_mut().map(|sequence| (sequence, n as u32)))?;
        step.append(0, &values, &values)?;
        step.commit()?;
        tokens -= n;
    }
    Ok(())
}

/// Bytes of the prompt once and of all own tokens; and bytes in use: first, after the forks and their prompt moved down each by itself, and
/// after they moved down together.
fn bytes(prompt: usize) -> Result<(u64, [u64; 3])> {
    let cache = cache()?;
    let page = cache.config().layers[0].layout.bytes();
    let mut sequence = [cache.sequence()];
    add(&cache, &mut sequence, prompt)?;
    sequence[0].seal()?;
    let mut forks: Vec<Sequence> = (0..FORKS).map(|_| sequence[0].fork()).collect();
    add(&cache, &mut forks, OWN)?;
    forks.extend(sequence);
    let taken = || cache.usage().taken;
    let first = taken();
    for fork in &mut forks {
        fork.demote(u64::MAX)?;
    }
    let each = taken();
    cache.demote(&mut forks, u64::MAX)?;
    Ok(((prompt + FORKS * OWN) as u64 / 32 * page, [first, each, taken()]))
}

/// Nanoseconds a token of a look-up.
fn lookup(index: &PrefixIndex, tokens: &[u32]) -> Result<f64> {
    let scope = PrefixScope::new(b"bench");
    let mut all = Vec::new();
    for _ in 0..200 {
        let start = Instant::now();
        let found = index.find(&scope, tokens)?;
        all.push(start.elapsed().as_nanos() as f64 / tokens.len() as f64);
        drop(found);
    }
    all.sort_by(f64::total_cmp);
    Ok(median(&all))
}

fn main() -> Result<()> {
    let quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let command = "cargo bench -p pikv-benches --bench prefix";
    let mut csv =
        String::from("ring,prompt,forks,own,bytes,ideal,ratio,each,together,machine,date,commit,command\n");
    for prompt in [256, 1024, 8192] {
        let (ideal, [bytes, each, together]) = bytes(prompt)?;
        let (ratio, from) = (bytes as f64 / ideal as f64, machine::provenance(command)?);
        writeln!(csv, "{RING},{prompt},{FORKS},{OWN},{bytes},{ideal},{ratio:.4},{each},{together},{from}")?;
    }
    print!("{csv}");
    let (cache, tokens) = (cache()?, 8192);
    let index = PrefixIndex::new(&cache, 1 << 29);
    let prompt: Vec<u32> = (0..tokens + 10).collect();
    let mut sequence = [cache.sequence()];
    add(&cache, &mut sequence, prompt.len())?;
    index.publish(&PrefixScope::new(b"bench"), &prompt, &mut sequence[0])?;
    let other: Vec<u32> = prompt.iter().map(|token| token + 1).collect();
    let mut lookups = String::from("tokens,known,ns_a_token,machine,date,commit,command\n");
    for (known, prompt) in [(true, &prompt), (false, &other)] {
        let ns = lookup(&index, prompt)?;
        writeln!(lookups, "{},{known},{ns:.1},{}", prompt.len(), machine::provenance(command)?)?;
    }
    print!("{lookups}");
    if !quick {
        let results = concat!(env!("CARGO_MANIFEST_DIR"), "/results/");
        std::fs::write(format!("{results}prefix.csv"), csv)?;
        std::fs::write(format!("{results}lookups.csv"), lookups)?;
    }
    Ok(())
}
