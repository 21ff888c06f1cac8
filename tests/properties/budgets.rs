//! Sequences with a budget of their own, under every policy. Each has the bits of a sequence in a cache that has that budget for all; the
//! other sequences have the bits of a cache without such a budget.

use super::named::{POLICIES, eviction};
use pikv::policy::{Budget, Eviction, StreamingLlm};
use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Sequence, SequenceOptions};
use pikv_test::backend::backend;
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;

const LAYERS: usize = 2;
const HEADS: u32 = 2;
const DIM: usize = 4;
/// The configuration's budget of a head, and one sequence's own.
const ALL: u32 = 160;
const OWN: u32 = 70;

fn config(evict: Option<Eviction>) -> CacheConfig {
    let layer = LayerShape::new(HEADS, 2 * HEADS, DIM as u32, Dtype::F32);
    let config = CacheConfig::new(vec![layer; LAYERS], 64 << 20).ring(16).sinks(2).rollback(4).nan_fill(true);
    let config = config.tiers(Tiers::new().host(64 << 20)).backend(backend());
    evict.into_iter().fold(config, CacheConfig::evict)
}

/// Adds `n` tokens to each of some sequences in one step; returns the bits of attention, by sequence.
fn add(cache: &Cache, sequences: Vec<(&mut Sequence, u64)>, n: usize) -> Vec<Vec<u32>> {
    let of: Vec<(u64, u64)> =
        sequences.iter().map(|(s, seed)| (*seed, u64::from(s.next_position().0))).collect();
    let mut all: Vec<Vec<u32>> = of.iter().map(|_| Vec::new()).collect();
    let mut step = cache.begin(sequences.into_iter().map(|(s, _)| (s, n as u32))).unwrap();
    for layer in 0..LAYERS {
        let rows = |what: u64, width: usize| -> Vec<f32> {
            let positions =
                of.iter().flat_map(|(seed, first)| (*first..first + n as u64).map(move |p| (seed, p)));
            positions
                .flat_map(|(seed, p)| noise(seed << 40 ^ p << 8 ^ (layer as u64) << 4 ^ what, width))
                .collect()
        };
        let (kv, heads) = (HEADS as usize * DIM, 2 * HEADS as usize * DIM);
        let mut out = vec![0.0; of.len() * n * heads];
        step.append(layer, &rows(1, kv), &rows(2, kv)).unwrap();
        step.attend(layer, &rows(3, heads), &Attend::new(0.7), AttendOutput::new(&mut out)).unwrap();
        all.iter_mut().zip(out.chunks_exact(n * heads)).for_each(|(all, out)| all.extend(bits(out)));
    }
    step.commit().unwrap();
    all
}

/// The pages of a sequence, with their tokens.
fn pages(sequence: &Sequence) -> Vec<(String, Vec<u32>)> {
    let heads = (0..LAYERS).flat_map(|layer| (0..HEADS as usize).map(move |head| (layer, head)));
    let of = |(layer, head)| {
        sequence.pages(layer, head).unwrap().map(move |page| {
            let tokens = sequence.positions(layer, head, page.id).unwrap();
            (format!("{layer} {head} {}", page.id), tokens.map(|(_, p)| p.0).collect())
        })
    };
    heads.flat_map(of).collect()
}

#[test]
fn a_budget_of_its_own_is_that_of_a_cache_of_its_own() {
    for (policy, seed) in POLICIES.into_iter().flat_map(|p| (0..scaled(1, 20)).map(move |seed| (p, seed))) {
        let cache = |tokens| {
            Cache::new(config(Some(eviction(policy, Budget::Tokens(tokens), None).batch(3)))).unwrap()
        };
        let (mixed, small, large) = (cache(ALL), cache(OWN), cache(ALL));
        let mut own = mixed.sequence_with(SequenceOptions::new().budget(OWN)).unwrap();
        let (mut beside, mut twin, mut other) = (mixed.sequence(), small.sequence(), large.sequence());
        let mut rng = Rng(seed);
        for i in 0..60 {
            let n = if i < 4 { 60 + rng.below(40) } else { 1 + rng.below(4) } as usize;
            let got = add(&mixed, vec![(&mut own, 1), (&mut beside, 2)], n);
            assert_eq!(got[0], add(&small, vec![(&mut twin, 1)], n)[0], "{policy}, {seed}, {i}");
            assert_eq!(got[1], add(&large, vec![(&mut other, 2)], n)[0], "{policy}, {seed}, {i}: beside it");
            match rng.below(6) {
                0 => {
                    let n = rng.below(5).min(own.rollback_limit());
                    assert_eq!((own.rollback(n), twin.rollback(n)), (Ok(()), Ok(())));
                    beside.rollback(n).unwrap();
                    other.rollback(n).unwrap();
                }
                1 => (own, twin) = (own.fork(), twin.fork()),
                2 => {
                    let parked = [&mut own, &mut twin].map(|sequence| sequence.park(1).unwrap());
                    [own, twin] = parked.map(|parked| parked.wake().unwrap());
                }
                3 => {
                    let mut bytes = Vec::new();
                    own.save(b"", &mut bytes).unwrap();
                    own = mixed.restore(&mut &bytes[..]).unwrap().sequence;
                }
                4 => {
                    own.checkpoint().unwrap();
                    twin.checkpoint().unwrap();
                    let len = own.next_position().0;
                    (own, twin) = (own.fork_at(len).unwrap(), twin.fork_at(len).unwrap());
                    own.drop_checkpoints(..);
                    twin.drop_checkpoints(..);
                }
                _ => {}
            }
            assert_eq!((own.budget(), pages(&own)), (Some(OWN), pages(&twin)), "{policy}, {seed}, {i}");
        }
        own.clear();
        assert_eq!((own.budget(), own.next_position().0), (Some(OWN), 0));
        let held = |of: &Sequence| of.resident(1, 1).unwrap().0;
        assert!(policy == "DuoLit" || policy.contains("shared") || held(&twin) <= OWN + 3, "{policy}");
    }
}

#[test]
fn what_could_not_act_is_refused() {
    let with = |evict: Option<Eviction>, tokens| {
        Cache::new(config(evict)).unwrap().sequence_with(SequenceOptions::new().budget(tokens)).map(|_| ())
    };
    let by = |budget| Some(Eviction::new(StreamingLlm, budget));
    let refused = |made: Result<(), Error>| match made {
        Err(Error::SequenceBudget { tokens, why }) => (tokens, why),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(with(by(Budget::Tokens(ALL)), 0)), (0, "it must be at least 1"));
    assert_eq!(refused(with(None, 9)), (9, "no layer of the cache evicts; set CacheConfig::evict"));
    let lower = "the configuration lets no head hold more; give less than its budget";
    assert_eq!(refused(with(by(Budget::Tokens(ALL)), ALL)), (ALL, lower));
    with(by(Budget::Tokens(ALL)), ALL - 1).unwrap();
    let layers = || by(Budget::Layers([ALL, 300].into()));
    assert_eq!(refused(with(layers(), 300)), (300, lower));
    with(layers(), 299).unwrap();
    with(by(Budget::Heads([vec![Budget::ALL, 20], vec![20, 20]].into())), 1 << 20).unwrap();
    with(by(Budget::Share(0.5)), 1 << 20).unwrap();
    with(by(Budget::Bytes(1 << 20)), 1 << 20).unwrap();
    assert_eq!(
        Cache::new(config(None)).unwrap().sequence_with(SequenceOptions::new()).unwrap().budget(),
        None
    );
}

/// A sequence's own budget also limits a head that keeps all tokens by the configuration, and one with a share.
#[test]
fn the_lesser_of_both_budgets_counts() {
    for budget in [Budget::Heads([vec![Budget::ALL, 40], vec![40, 90]].into()), Budget::Share(0.9)] {
        let cache = Cache::new(config(Some(Eviction::new(StreamingLlm, budget.clone()).batch(1)))).unwrap();
        let mut own = cache.sequence_with(SequenceOptions::new().budget(OWN)).unwrap();
        (0..20).for_each(|_| drop(add(&cache, vec![(&mut own, 1)], 16)));
        let held = |layer, head| own.resident(layer, head).unwrap().0;
        let want = if budget == Budget::Share(0.9) { [OWN; 4] } else { [OWN, 40, 40, OWN] };
        assert_eq!([held(0, 0), held(0, 1), held(1, 0), held(1, 1)], want);
    }
}

#[test]
fn prefixes_are_found_by_sequences_of_the_same_budget_only() {
    let cache = Cache::new(config(Some(Eviction::new(StreamingLlm, Budget::Tokens(ALL))))).unwrap();
    let index = PrefixIndex::new(&cache, 32 << 20);
    let scope = PrefixScope::new(b"all");
    let tokens: Vec<u32> = (0..65).collect();
    let mut own = cache.sequence_with(SequenceOptions::new().budget(OWN)).unwrap();
    add(&cache, vec![(&mut own, 1)], 64);
    assert_eq!(index.publish(&scope, &tokens, &mut own), Ok(64));
    let found = |scope: &PrefixScope<'_>| {
        let found = index.find(scope, &tokens).unwrap();
        (found.next_position().0, found.budget())
    };
    assert_eq!(found(&scope), (0, None));
    assert_eq!(found(&scope.budget(OWN)), (64, Some(OWN)));
    assert_eq!(found(&scope.budget(OWN + 1)), (0, Some(OWN + 1)));
    assert!(matches!(
        index.find(&scope.budget(ALL), &tokens),
        Err(Error::SequenceBudget { tokens: ALL, .. })
    ));
    let mut plain = cache.sequence();
    add(&cache, vec![(&mut plain, 1)], 64);
    assert_eq!(index.publish(&scope.budget(OWN), &tokens, &mut plain), Ok(64));
    assert_eq!(found(&scope), (64, None));
}
