//! The map to shards.

use pikv_core::shard::{Rule, ShardError, ShardMap};
use std::collections::HashSet;

/// Count of each id over all pairs of residues, the whole period; `None` if an id lies outside `0..max`.
fn ids(tokens: u32, experts: u32) -> Option<Vec<u32>> {
    let mut count = vec![0; tokens.max(experts) as usize];
    for t in 0..tokens {
        for e in 0..experts {
            *count.get_mut((t ^ e) as usize)? += 1;
        }
    }
    Some(count)
}

fn uniform(count: &[u32]) -> bool {
    count.iter().all(|n| *n == count[0])
}

#[test]
fn the_papers_map_is_accepted_just_where_it_is_uniform() {
    for tokens in 1..=40u32 {
        for experts in 1..=40u32 {
            let even = ids(tokens, experts).is_some_and(|count| uniform(&count));
            let got = ShardMap::xor(tokens, experts, 1);
            assert_eq!(got.is_ok(), even, "{tokens} & {experts}: {got:?}");
            let Err(error) = got else { continue };
            let ShardError::Skewed { tokens: t, experts: e, multiple, would_do } = error else {
                panic!("{tokens} & {experts}: {error:?}")
            };
            assert_eq!((t, e), (tokens, experts));
            let (small, large) = (tokens.min(experts), tokens.max(experts));
            assert_eq!(multiple, u64::from(small).next_power_of_two());
            // The proposed value is accepted, and no value between.
            let with = |large: u32| {
                if tokens < experts {
                    ShardMap::xor(tokens, large, 1)
                } else {
                    ShardMap::xor(large, experts, 1)
                }
            };
            let would_do = u32::try_from(would_do).unwrap();
            assert!(would_do > large && with(would_do).is_ok(), "{error}");
            assert!((large..would_do).all(|n| with(n).is_err()), "{error}");
            let text = error.to_string();
            assert!([tokens, experts, would_do].iter().all(|n| text.contains(&n.to_string())), "{text}");
        }
    }
}

#[test]
fn shards_must_divide_the_ids() {
    for tokens in 1..=40u32 {
        for experts in 1..=40u32 {
            if ShardMap::xor(tokens, experts, 1).is_err() {
                continue;
            }
            let range = tokens.max(experts);
            for shards in 1..=range + 3 {
                let got = ShardMap::xor(tokens, experts, shards);
                let mut count = vec![0u32; shards as usize];
                for t in 0..tokens {
                    (0..experts).for_each(|e| count[((t ^ e) % shards) as usize] += 1);
                }
                assert_eq!(got.is_ok(), uniform(&count), "{tokens} & {experts} on {shards}: {got:?}");
                match got {
                    Ok(map) => {
                        assert_eq!((map.shards(), map.rule()), (shards, Rule::Xor { tokens, experts }));
                        // Any t and expert, reduced to their residues.
                        for t in (0..3 * u64::from(tokens)).chain([u64::MAX, 1 << 33]) {
                            for e in (0..experts + 3).chain([u32::MAX]) {
                                let id = (t % u64::from(tokens)) as u32 ^ (e % experts);
                                assert!(id < range);
                                assert_eq!((map.id(t, e, e ^ 5), map.shard(t, e, 1)), (id, id % shards));
                            }
                        }
                    }
                    Err(error) => {
                        let ShardError::Uneven { shards: s, range: r, would_do } = error else {
                            panic!("{error:?}")
                        };
                        assert_eq!((s, r), (shards, range));
                        assert!(ShardMap::xor(tokens, experts, would_do).is_ok(), "{error}");
                        assert!((would_do + 1..=shards).all(|g| ShardMap::xor(tokens, experts, g).is_err()));
                    }
                }
            }
        }
    }
}

#[test]
fn the_moduli_of_the_specification() {
    for (tokens, experts) in [(8, 8), (16, 8), (96, 16), (8, 16), (16, 96), (1, 7), (7, 1), (1, 1)] {
        assert!(ids(tokens, experts).is_some_and(|count| uniform(&count)), "{tokens} & {experts}");
        assert!(ShardMap::xor(tokens, experts, 1).is_ok(), "{tokens} & {experts}");
    }
    for (tokens, experts, next) in [(6, 6, 8), (7, 7, 8), (12, 10, 16), (100, 16, 112), (16, 100, 112)] {
        assert!(!ids(tokens, experts).is_some_and(|count| uniform(&count)), "{tokens} & {experts}");
        let got = ShardMap::xor(tokens, experts, 1);
        assert!(matches!(got, Err(ShardError::Skewed { would_do, .. }) if would_do == next), "{got:?}");
    }
    for (tokens, experts, shards) in [(0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)] {
        assert_eq!(ShardMap::xor(tokens, experts, shards), Err(ShardError::Zero));
    }
    assert_eq!(ShardMap::sum(0), Err(ShardError::Zero));
}

#[test]
fn moduli_at_the_end_of_u32() {
    assert!(ShardMap::xor(1 << 31, 1 << 31, 1 << 31).is_ok());
    // Like 7 & 7 and 7 & 6: the next accepted value is 2^32.
    for experts in [u32::MAX, u32::MAX - 1, (1 << 31) + 1] {
        let got = ShardMap::xor(u32::MAX, experts, 1);
        assert!(matches!(got, Err(ShardError::Skewed { would_do: 0x1_0000_0000, .. })), "{experts}: {got:?}");
    }
}

#[test]
fn the_sum_is_uniform_for_every_number_of_shards() {
    for shards in 1..=70u32 {
        let map = ShardMap::sum(shards).unwrap();
        assert_eq!((map.shards(), map.rule()), (shards, Rule::Sum));
        let mut count = vec![0u32; shards as usize];
        for t in 0..u64::from(shards) {
            for e in 0..shards {
                assert_eq!(u64::from(map.shard(t, e, 0)), (t + u64::from(e)) % u64::from(shards));
                assert_eq!(map.shard(t, e, 7), map.shard(t + 7, e, 0));
                count[map.shard(t, e, 3) as usize] += 1;
            }
        }
        assert!(uniform(&count), "{shards} shards: {count:?}");
        // Each expert alone visits all shards, one after the other.
        for e in [0, 1, shards, u32::MAX] {
            let over: HashSet<u32> = (0..u64::from(shards)).map(|t| map.shard(1 << 40 | t, e, 2)).collect();
            let first: HashSet<u32> = (0..u64::from(shards)).map(|t| map.shard(t, e, 2)).collect();
            assert_eq!(first.len() as u32, shards);
            assert!(over.len() as u32 <= shards && over.iter().all(|s| *s < shards));
        }
        for t in [u64::MAX, u64::MAX - 1, 1 << 63] {
            let want = (u128::from(t) + 2 * u128::from(u32::MAX)) % u128::from(shards);
            assert_eq!(u128::from(map.shard(t, u32::MAX, u32::MAX)), want);
        }
    }
    assert_eq!(ShardMap::ONE.shards(), 1);
    assert_eq!(ShardMap::ONE.shard(u64::MAX, u32::MAX, u32::MAX), 0);
}

#[test]
fn the_spread_goes_round_from_where_each_expert_and_head_begins() {
    // 1 / rho and 1 / rho^2, rho the real root of x^3 = x + 1.
    let rho = 1.324_717_957_244_746_f64;
    let frac = |x: f64| x - x.floor();
    for shards in [1u32, 2, 3, 8, 60, 64, 1000, 1024, u32::MAX] {
        let map = ShardMap::spread(shards).unwrap();
        assert_eq!((map.shards(), map.rule()), (shards, Rule::Spread));
        for (e, head) in [(0, 0), (1, 0), (0, 1), (7, 5), (127, 191), (511, 2047)] {
            let begin = map.shard(0, e, head);
            let want = f64::from(shards) * frac(f64::from(e) / rho + f64::from(head) / (rho * rho));
            // The fixed point is off by less than 2^-20 of the circle here.
            assert!(
                (f64::from(begin) - want).abs() <= 1.0 + f64::from(shards) / 1_048_576.0,
                "{shards} {e} {head}"
            );
            for t in [0, 1, 5, u64::from(shards), 1 << 40, u64::MAX] {
                let want = (u128::from(t) + u128::from(begin)) % u128::from(shards);
                assert_eq!(u128::from(map.shard(t, e, head)), want);
            }
        }
        assert_eq!(map.shared(3, 9), map.shard(3, 0, 9));
        assert!(map.shard(u64::MAX, u32::MAX, u32::MAX) < shards);
    }
    assert_eq!(ShardMap::spread(0), Err(ShardError::Zero));
    // Pages without an expert are spread by the rules of `shared`.
    assert_eq!(ShardMap::sum(7).unwrap().shared(9, 4), 6);
    assert_eq!(ShardMap::xor(4, 4, 4).unwrap().shared(u64::MAX, u32::MAX), 2);
}

/// Shows why t is a block of pages and not a token.
#[test]
fn by_token_one_expert_changes_shard_at_every_step() {
    for (tokens, experts, shards) in [(8, 8, 8), (8, 8, 4), (8, 8, 2), (16, 8, 8), (96, 16, 8), (512, 16, 8)]
    {
        let map = ShardMap::xor(tokens, experts, shards).unwrap();
        for expert in 0..experts {
            let switches = |t: fn(u64) -> u64| {
                (0..511u64).filter(|i| map.shard(t(*i), expert, 0) != map.shard(t(i + 1), expert, 0)).count()
            };
            assert_eq!(switches(|token| token), 511, "{tokens} & {experts} on {shards}");
            assert_eq!(switches(|token| token / 32), 15);
            assert_eq!(switches(|token| token / 256), 1);
        }
    }
    // Pure expert sharding never changes the shard.
    let map = ShardMap::xor(1, 8, 8).unwrap();
    assert!((0..511u64).all(|t| map.shard(t, 5, 9) == 5));
}
