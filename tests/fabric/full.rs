//! Nearly full ranks: whatever an append or a commit stored can be read, and no read allocates on a rank.

use pikv::codec::{Code, Codec, Coding};
use pikv::fabric::{FabricError, InProcess, Options};
use pikv::policy::{Budget, Eviction, Lru};
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Position, ReadPages, Rows, Sequence,
};
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;

const DIM: usize = 32;

fn config(codec: bool, slack: u32) -> CacheConfig {
    let layer = LayerShape::new(1, 1, DIM as u32, Dtype::F32);
    let config = CacheConfig::new(vec![layer], 16 << 20).ring(32).rollback(slack).experts(4, 1);
    match codec {
        true => config.compress(Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8))),
        false => config,
    }
}

fn over(config: CacheConfig, budget: u64) -> Cache {
    let config = config.shards(ShardMap::sum(4).unwrap());
    let ranks = InProcess::new(&config, 4, budget).unwrap();
    Cache::over(config, Box::new(ranks), Options::default()).unwrap()
}

/// A step of `n` tokens, attended if `attended`: whether it was refused, which only an append or the commit may be.
fn extend(cache: &Cache, s: &mut Sequence, n: usize, seed: u64, attended: bool) -> Result<Vec<u32>, Error> {
    let mut rng = Rng(seed);
    let mut out = vec![0.0; n * DIM];
    let mut step = cache.begin([(s, n as u32)])?;
    step.append(0, &noise(seed, n * DIM), &noise(seed + 1, n * DIM))?;
    if attended {
        step.attend(0, &noise(seed + 2, n * DIM), &Attend::new(0.2), AttendOutput::new(&mut out)).unwrap();
    }
    step.route(0, &(0..n).map(|_| rng.below(4) as u16).collect::<Vec<_>>())?;
    step.commit()?;
    Ok(bits(&out))
}

fn read(cache: &Cache, s: &Sequence) -> Result<Vec<u32>, Error> {
    let mut out = [0.0; DIM];
    let rows = [Rows::new(s, Position(s.next_position().0 - 1), 1)];
    cache.attend(
        0,
        &rows,
        &noise(7, DIM),
        &Attend::new(0.2).read(ReadPages::All),
        AttendOutput::new(&mut out),
    )?;
    Ok(bits(&out))
}

fn bytes(cache: &Cache) -> u64 {
    cache.ranks().unwrap().iter().map(|rank| rank.bytes).sum()
}

/// With any budget of the ranks, committed tokens are read with the bits of one process.
#[test]
fn what_is_committed_can_be_read() {
    let (rounds, mut refused) = (scaled(24, 600), 0);
    for round in 0..rounds {
        let mut rng = Rng(round);
        let (codec, slack) = (rng.one_in(2), rng.of(&[0, 8, 40]));
        let mut shape = config(codec, slack);
        let policy = rng.one_in(3);
        if policy {
            shape = shape.evict(Eviction::new(Lru::default(), Budget::Tokens(150)));
        }
        let full = over(shape.clone(), (20 << 10) + u64::from(rng.below(60 << 10)));
        let one = Cache::new(shape).unwrap();
        let (mut all, mut twins) = (vec![full.sequence()], vec![one.sequence()]);
        for i in 0..120 {
            let at = rng.below(all.len() as u32) as usize;
            let (seed, n) = (round << 20 | i << 4, rng.of(&[1, 1, 3, 32]));
            let attended = rng.one_in(2);
            match extend(&full, &mut all[at], n, seed, attended) {
                Ok(out) => assert_eq!(out, extend(&one, &mut twins[at], n, seed, attended).unwrap()),
                Err(error) => {
                    assert!(matches!(error, Error::Fabric(_) | Error::OutOfBudget { .. }), "{error:?}");
                    refused += 1;
                }
            }
            if rng.one_in(6) && all.len() < 4 {
                let (fork, twin) = (all[at].fork(), twins[at].fork());
                let before = bytes(&full);
                all.push(fork);
                twins.push(twin);
                assert_eq!(bytes(&full), before);
            }
            if rng.one_in(5) {
                let back = rng.below(slack + 1).min(all[at].rollback_limit());
                all[at].rollback(back).unwrap();
                twins[at].rollback(back).unwrap();
            }
            if rng.one_in(20) && all.len() > 1 {
                all.remove(at);
                twins.remove(at);
            }
            for (s, twin) in all.iter().zip(&twins).filter(|(s, _)| s.next_position().0 > 0) {
                let before = bytes(&full);
                let got = match read(&full, s) {
                    // Compacted pages are held by the front again, and their rank may have no room for them.
                    Err(Error::Fabric(FabricError::Budget { .. })) if policy => continue,
                    got => got.unwrap_or_else(|error| panic!("round {round}, step {i}: {error}")),
                };
                assert!(got == read(&one, twin).unwrap(), "round {round}, step {i}");
                // Freed pages are reported with the next message.
                assert!(policy || bytes(&full) <= before, "round {round}, step {i}: memory taken");
            }
        }
        drop(all);
        assert_eq!(bytes(&full), 0, "round {round}");
    }
    assert!(refused > rounds, "ranks were full {refused} times");
}
