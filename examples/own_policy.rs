//! A custom policy next to policies of pikv, on a synthetic task: 12 of 600 tokens are looked up repeatedly, each time long after they were
//! added. The table shows the error under a budget of 96 tokens a head.
//!
//! ```sh
//! cargo run --release -p pikv-examples --bin own_policy
//! ```

use pikv::policy::{
    Budget, Candidates, Eviction, H2o, Lru, MassFeedback, Policy, Seen, SnapKv, StreamingLlm,
};
use pikv::shape::LANES;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape};
use std::error::Error;

/// Utility is the largest weight that any row gave the token: a token that was looked up once is kept, however seldom that happens.
#[derive(Debug)]
struct Peak;

impl Policy for Peak {
    fn name(&self) -> &str {
        "peak"
    }

    fn feedback(&self) -> MassFeedback {
        MassFeedback::All
    }

    fn words(&self) -> usize {
        1
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        for t in seen.lanes() {
            state[0][t] = state[0][t].max(seen.mass[t] / seen.rows as f32);
        }
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        for (i, u) in utility.iter_mut().enumerate() {
            *u = tokens.state(i, 0);
        }
    }
}

const DIM: usize = 32;
const TOKENS: u32 = 600;
const NEEDLES: u32 = 12;

fn noise(seed: u32) -> Vec<f32> {
    let mut x = u64::from(seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..8).for_each(|_| _ = next());
    (0..DIM).map(|_| next()).collect()
}

/// The token that the row at `p` looks up: each needle first 30 tokens after it was added, then every 61 tokens.
fn sought(p: u32) -> Option<u32> {
    let needle = |n: u32| n * 20 + 10;
    (0..NEEDLES).map(needle).find(|at| p > *at + 29 && (p - at - 30).is_multiple_of(61))
}

/// Outputs of all rows that look up a needle.
fn play(config: CacheConfig) -> Result<(Vec<Vec<f32>>, u32), pikv::Error> {
    let cache = Cache::new(config)?;
    let mut sequence = cache.sequence();
    let mut found = Vec::new();
    for p in 0..TOKENS {
        let mut out = vec![0.0; DIM];
        // A query is noise, or the key of the token to look up.
        let query = sought(p).map_or_else(|| noise(p + 50_000), noise);
        let mut step = cache.begin([(&mut sequence, 1)])?;
        step.append(0, &noise(p), &noise(p + 10_000))?;
        step.attend(0, &query, &Attend::new(1.0), AttendOutput::new(&mut out))?;
        step.commit()?;
        if sought(p).is_some() {
            found.push(out);
        }
    }
    Ok((found, sequence.resident(0, 0)?.0))
}

fn main() -> Result<(), Box<dyn Error>> {
    let layer = LayerShape::new(1, 1, DIM as u32, Dtype::F32);
    let config = CacheConfig::new(vec![layer], 16 << 20).ring(32).sinks(4);
    let (exact, all) = play(config.clone())?;
    println!("{:<14} {:>6}  {:>10}", "policy", "tokens", "error");
    println!("{:<14} {all:>6}  {:>10.4}", "none", 0.0);
    let budget = || Budget::Tokens(96);
    let rules = [
        Eviction::new(StreamingLlm, budget()),
        Eviction::new(Lru::default(), budget()),
        Eviction::new(SnapKv::default(), budget()),
        Eviction::new(H2o, budget()),
        Eviction::new(Peak, budget()),
    ];
    let mut errors = Vec::new();
    for rule in rules {
        let name = rule.policy.name().to_owned();
        let (got, held) = play(config.clone().evict(rule))?;
        // Relative error, averaged over the rows that look up a token.
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
        let off = |(a, b): (&Vec<f32>, &Vec<f32>)| {
            norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
        };
        let error = got.iter().zip(&exact).map(off).sum::<f32>() / exact.len() as f32;
        println!("{name:<14} {held:>6}  {error:>10.4}");
        if held > 96 {
            return Err(format!("{name} holds {held} tokens of 96").into());
        }
        errors.push(error);
    }
    match errors[..] {
        [streaming, .., own] if own < 0.5 * streaming => Ok(()),
        _ => {
            Err("a policy that keeps what was found loses less than half of what the newest tokens alone do"
                .into())
        }
    }
}
