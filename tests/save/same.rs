//! Histories in which sequences are saved and restored at any time are equal to those without.

use crate::setup::{BY_HITS, CODECS, POLICIES, Seen, Setup, Twins};
use pikv::Dtype;
use pikv_test::numbers::Rng;
use pikv_test::twins::{self, CHANGES, Change, Model};
use proptest::prelude::*;

fn setup() -> impl Strategy<Value = Setup> {
    let some = |n| prop_oneof![1 => Just(None), 2 => (0..n).prop_map(Some)];
    (twins::model(1..=3), some(POLICIES), any::<bool>(), some(CODECS), any::<bool>(), any::<bool>()).prop_map(
        |(model, policy, by_page, codec, aged, tiers)| {
            let tiers = tiers && policy != Some(BY_HITS);
            Setup { model, policy, by_page, codec, aged, tiers }
        },
    )
}

#[derive(Clone, Debug)]
enum Op {
    New,
    /// Sequences and tokens, what is read, and the layers done before the step is dropped.
    Step(Vec<(u8, u32)>, u8, Option<usize>),
    Change(Change),
    Pin(u8, u32, u32),
    Demote(u8, u32),
    Seal(u8),
    Carry,
    Park,
}

fn op() -> impl Strategy<Value = Op> {
    let part = || (0u8..4, prop_oneof![3 => Just(1u32), 2 => 1u32..=12, 3 => 10u32..=90]);
    let parts = || proptest::collection::vec(part(), 1..=2);
    prop_oneof![
        1 => Just(Op::New),
        14 => (parts(), any::<u8>()).prop_map(|(parts, read)| Op::Step(parts, read, None)),
        2 => (parts(), any::<u8>(), 0usize..=3).prop_map(|(parts, read, at)| Op::Step(parts, read, Some(at))),
        CHANGES => twins::change().prop_map(Op::Change),
        1 => (0u8..4, 0u32..300, 1u32..20).prop_map(|(sequence, from, n)| Op::Pin(sequence, from, n)),
        3 => (0u8..4, 0u32..30).prop_map(|(sequence, pages)| Op::Demote(sequence, pages)),
        1 => (0u8..4).prop_map(Op::Seal),
        6 => Just(Op::Carry),
        4 => Just(Op::Park),
    ]
}

fn run(setup: &Setup, ops: &[Op]) -> Seen {
    let mut twins = Twins::new(setup);
    for op in ops {
        match op {
            Op::New if twins.pairs.len() < 4 => twins.add(),
            Op::New => {}
            Op::Step(parts, read, abort) => twins.step(parts, *read, *abort),
            Op::Change(change) => twins.change(change),
            Op::Pin(sequence, from, n) => {
                let at = twins::at(&twins.pairs, *sequence);
                twins.pairs[at].iter_mut().for_each(|sequence| sequence.pin(*from..from + n));
            }
            Op::Demote(sequence, pages) if setup.tiers && twins.side == 1 => {
                let at = twins::at(&twins.pairs, *sequence);
                let page = setup.model.page() / (setup.model.layers as u64 * u64::from(setup.model.kv_heads));
                twins.pairs[at][1].demote(u64::from(*pages) * page).unwrap();
            }
            Op::Demote(..) => {}
            Op::Seal(sequence) => twins.seal(*sequence),
            Op::Carry => twins.carry(),
            Op::Park => twins.park(),
        }
        twins.check();
    }
    twins.end()
}

proptest! {
    #![proptest_config(pikv_test::cases(40, 3000))]
    #[test]
    fn whenever_they_are_saved(setup in setup(), ops in proptest::collection::vec(op(), 1..60)) {
        run(&setup, &ops);
    }
}

/// A model in which pages are packed, evicted and put together soon.
fn model(experts: u32, window: Option<u32>, rollback: u32) -> Model {
    Model {
        layers: 2,
        kv_heads: 2,
        k_dim: 4,
        v_dim: 3,
        dtype: Dtype::F32,
        window,
        rope: true,
        ring: 16,
        rollback,
        sinks: 2,
        experts,
        codec: None,
        policy: None,
        shards: 2,
    }
}

/// One history for a setup: saved every few steps, taken back, evicted from.
fn history(setup: &Setup, seed: u64) -> Seen {
    let mut twins = Twins::new(setup);
    let mut rng = Rng(seed);
    twins.pairs[0].iter_mut().for_each(|sequence| sequence.pin(5..9));
    for turn in 0..24 {
        let n = if turn % 6 == 0 { 40 + rng.below(50) } else { 1 + rng.below(9) };
        twins.step(&[(0, n)], rng.below(8) as u8, None);
        if rng.one_in(3) {
            let n = rng.below(setup.model.rollback + 1);
            twins.change(&Change::Rollback { sequence: 0, n });
        }
        if setup.tiers && twins.side == 1 {
            twins.pairs[0][1].demote(4096).unwrap();
        }
        if rng.one_in(3) {
            twins.carry();
        }
        if rng.one_in(3) {
            twins.park();
        }
        twins.check();
    }
    twins.end()
}

/// Every policy of the table, with and without whole pages, experts, a window, a rollback and lower tiers; every codec, packed again too.
#[test]
fn every_policy_and_every_codec() {
    let mut sum = Seen::default();
    let mut add = |setup: &Setup, seed| {
        let seen = history(setup, seed);
        assert!(seen.saves > 2, "{setup:?}");
        (sum.away, sum.packed, sum.gone, sum.parks) =
            (sum.away + seen.away, sum.packed + seen.packed, sum.gone + seen.gone, sum.parks + seen.parks);
    };
    let most = pikv_test::scaled(1, 16);
    for policy in 0..POLICIES {
        for i in 0..most {
            let i = (i + u64::from(policy)) as u32;
            let window = (i % 3 == 2).then_some(70);
            let model = model([1, 3][i as usize / 2 % 2], window, [0, 9][i as usize % 2]);
            let setup = Setup {
                policy: Some(policy),
                by_page: i % 4 == 3,
                tiers: i % 5 == 1 && policy != BY_HITS,
                ..Setup::plain(model)
            };
            add(&setup, u64::from(i));
        }
    }
    for codec in 0..CODECS {
        for i in 0..most {
            let i = (i + u64::from(codec)) as u32;
            let policy = i.is_multiple_of(3).then_some((i % u32::from(POLICIES)) as u8);
            let model = model([1, 3][i as usize / 2 % 2], None, [9, 0][i as usize % 2]);
            let (aged, tiers) = (i % 4 != 1, i % 4 == 1 && policy != Some(BY_HITS));
            let setup = Setup { policy, by_page: true, codec: Some(codec), aged, tiers, model };
            add(&setup, u64::from(i));
        }
    }
    assert!(sum.away > 10_000 && sum.packed > 300 && sum.gone > 300 && sum.parks > 8, "{sum:?}");
}
