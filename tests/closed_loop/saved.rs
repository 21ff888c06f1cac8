//! A loop that is saved goes on as one that never stopped, by its outputs, routings, evictions and rollbacks; and what is refused.

use super::rollback::{looped, together};
use super::{EXPERTS, LAYERS, bits, config, routers, states, turn};
use pikv::closed_loop::LoopError;
use pikv::policy::{Budget, Eviction, StreamingLlm};
use pikv::router::{
    Adaptive, CacheAware, PageFeedback, RouteError, Router, RouterKind, RouterState, Routes, Shape,
    StateError,
};
use pikv::save::{Restored, SaveError};
use pikv::{Cache, ClosedLoop, Error, Position, ReadPages, Sequence, SequenceOptions};
use pikv_test::dir::Dir;
use pikv_test::numbers::Rng;
use pikv_test::saved_file;

/// Steps of random lengths, with drafts that are taken back: what is seen of each.
pub fn go_on(pikv: &mut ClosedLoop, sequence: &mut Sequence, seed: u64, steps: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng(seed);
    let mut all = Vec::new();
    for step in 0..steps {
        let out = turn(pikv, sequence, 1 + rng.below(3) as usize, 10_000 + step, ReadPages::Experts);
        let mut seen = bits(&out);
        for layer in 0..LAYERS {
            let report = pikv.report();
            let met = report.hits(layer).iter().chain(report.misses(layer));
            seen.extend(met.map(|pages| (*pages * 1024.0) as u32));
            seen.extend((0..2).map(|head| sequence.resident(layer, head).unwrap().0));
        }
        seen.extend(pikv.report().evicted.iter().map(|page| page.tokens));
        sequence.rollback(rng.below(4).min(sequence.rollback_limit())).unwrap();
        if rng.one_in(2) {
            let states = pikv.routers().iter().flat_map(|router| router.state().to_bytes());
            seen.extend(states.map(u32::from));
        }
        all.push(seen);
    }
    all
}

/// A loop that stepped, with the one of its sequences that is left.
fn begun(id: usize, seed: u64) -> (ClosedLoop, Sequence) {
    let (cache, mut pikv) = looped(id);
    let (mut a, mut b) = (cache.sequence(), cache.sequence());
    turn(&mut pikv, &mut a, 150, seed, ReadPages::All);
    let mut rng = Rng(seed);
    for step in 0..30 {
        let seed = 100 * seed + step;
        let (n, m) = (1 + rng.below(4) as usize, 1 + rng.below(4) as usize);
        together(&mut pikv, vec![(&mut b, m, seed + 50), (&mut a, n, seed)]);
        a.rollback(rng.below(3).min(a.rollback_limit())).unwrap();
        b.rollback(rng.below(3).min(b.rollback_limit())).unwrap();
    }
    // A fork has what is taken back of its original.
    let fork = a.fork();
    a.rollback(2).unwrap();
    drop((b, fork));
    turn(&mut pikv, &mut a, 3, seed + 1, ReadPages::Experts);
    a.rollback(1).unwrap();
    (pikv, a)
}

fn saved(pikv: &mut ClosedLoop, sequence: &Sequence) -> Vec<u8> {
    let mut bytes = Vec::new();
    let written = pikv.save(sequence, b"a note", &mut bytes).unwrap();
    assert_eq!(written, bytes.len() as u64);
    bytes
}

#[test]
fn a_restored_loop_goes_on_as_one_that_never_stopped() {
    for id in 0..7 {
        // A bandit draws for longer.
        let steps = pikv_test::scaled(if id == 5 { 1000 } else { 150 }, 1000) as u64;
        let (mut pikv, mut sequence) = begun(id, 3);
        let bytes = saved(&mut pikv, &sequence);
        // Another that learnt something else before.
        let (mut twin, _) = begun(id, 4);
        let Restored { sequence: mut restored, note, .. } = twin.restore(&mut &bytes[..]).unwrap();
        assert_eq!((&note[..], twin.kept_steps()), (&b"a note"[..], pikv.kept_steps()));
        assert!(pikv.kept_steps() > 0);
        assert_eq!(states(twin.routers()), states(pikv.routers()));
        assert!(saved(&mut twin, &restored) == bytes, "router {id}: what is restored is what was saved");
        // All that can be taken back.
        let limit = sequence.rollback_limit();
        assert_eq!(restored.rollback_limit(), limit);
        sequence.rollback(limit).unwrap();
        restored.rollback(limit).unwrap();
        assert_eq!(states(twin.routers()), states(pikv.routers()), "router {id}");
        let expected = go_on(&mut pikv, &mut sequence, 7, steps);
        for (step, (got, wanted)) in
            go_on(&mut twin, &mut restored, 7, steps).iter().zip(&expected).enumerate()
        {
            assert!(got == wanted, "router {id}, step {step}");
        }
        // The sequence alone, for whoever has no loop.
        let cache = pikv.cache().clone();
        let alone = cache.restore(&mut &bytes[..]).unwrap();
        assert_eq!(alone.bytes, bytes.len() as u64);
    }
}

#[test]
fn files_of_loops_outlast_and_keep_budgets() {
    let evict = Eviction::new(StreamingLlm, Budget::Tokens(40));
    let cache = Cache::new(config(2).rollback(8).evict(evict)).unwrap();
    let mut pikv = ClosedLoop::new(cache.clone(), routers(5, 2)).unwrap();
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "saved_loops");
    let path = dir.0.join("chat.safetensors");
    for budget in [None, Some(30)] {
        let mut sequence = cache.sequence_with(SequenceOptions::new().budget(budget)).unwrap();
        turn(&mut pikv, &mut sequence, 100, 1, ReadPages::All);
        let bytes = pikv.save_file(&sequence, b"", &path).unwrap();
        let restored = pikv.restore_file(&path).unwrap();
        assert_eq!((restored.bytes, restored.sequence.budget()), (bytes, budget));
        assert_eq!(restored.sequence.next_position().0, 100);
    }
    std::fs::remove_file(&path).unwrap();
    let missing = pikv.restore_file(&path).unwrap_err();
    assert!(matches!(missing, LoopError::Cache(Error::Save(SaveError::File { .. }))), "{missing}");
}

/// A router of one's own that learns more than it tells.
#[derive(Debug)]
struct Secret(Box<dyn Router>);

impl Router for Secret {
    fn kind(&self) -> RouterKind {
        self.0.kind()
    }
    fn shape(&self) -> Shape {
        self.0.shape()
    }
    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError> {
        self.0.route(first, logits, out)
    }
    fn observe(&mut self, feedback: &PageFeedback<'_>) -> Result<(), RouteError> {
        self.0.observe(feedback)
    }
    fn discard(&mut self) {
        self.0.discard();
    }
    fn saves(&self) -> Result<(), RouteError> {
        Err(RouteError::Unsaved { router: self.kind(), why: "it reads tea leaves" })
    }
    fn state(&self) -> RouterState {
        self.0.state()
    }
    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError> {
        self.0.restore(state)
    }
}

#[test]
fn what_cannot_be_saved_or_restored_is_named() {
    let (mut pikv, sequence) = begun(3, 1);
    let bytes = saved(&mut pikv, &sequence);
    let before = states(pikv.routers());
    let refused = |pikv: &mut ClosedLoop, mut bytes: &[u8]| pikv.restore(&mut bytes).unwrap_err();

    let mut alone = Vec::new();
    sequence.save(b"", &mut alone).unwrap();
    assert_eq!(refused(&mut pikv, &alone), LoopError::Cache(Error::Save(SaveError::NoRouters)));
    // Others of another kind, in the second layer only: the first has gone back.
    let mut mixed = routers(3, 2);
    mixed[1] = routers(2, 2).remove(1);
    let cache = pikv.cache().clone();
    let mut other = ClosedLoop::new(cache.clone(), mixed).unwrap();
    let fresh = states(other.routers());
    let kinds = StateError::Router { got: RouterKind::CacheAware, expected: RouterKind::LoadBalanced };
    let error = refused(&mut other, &bytes);
    assert_eq!(error, LoopError::Route { layer: 1, source: kinds.into() });
    assert_eq!(states(other.routers()), fresh);
    // A router that says that it cannot be saved.
    let shape = Shape::new(EXPERTS as u32, 2);
    let secret = Secret(Box::new(CacheAware::default().router(shape).unwrap()));
    let mut own = routers(3, 2);
    own[1] = Box::new(secret);
    let mut own = ClosedLoop::new(cache.clone(), own).unwrap();
    let error = own.save(&sequence, b"", &mut Vec::new()).unwrap_err();
    assert!(matches!(error, LoopError::Route { layer: 1, source: RouteError::Unsaved { .. } }), "{error}");
    let foreign = looped(3).0.sequence();
    let error = pikv.save(&foreign, b"", &mut Vec::new()).unwrap_err();
    assert_eq!(error, LoopError::Cache(Error::ForeignSequence { index: 0 }));
    // Ends that come early, and bits that changed.
    for at in (0..bytes.len()).step_by(97) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        for bytes in [&bytes[..at], &flipped] {
            let error = refused(&mut pikv, bytes);
            assert!(matches!(error, LoopError::Cache(_)), "{at}: {error}");
        }
    }
    assert_eq!(states(pikv.routers()), before);
    assert!(saved(&mut pikv, &sequence) == bytes);
}

/// Files with invalid numbers of routers and a matching checksum are refused, or the loop continues.
#[test]
fn hostile_numbers_are_refused_or_go_on() {
    let mut rng = Rng(11);
    let (mut refused, mut taken) = (0, 0);
    for id in [2, 5] {
        let (mut pikv, sequence) = begun(id, 1);
        let file = saved(&mut pikv, &sequence);
        let (n, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        let (from, to) = header.tensors()["routers"].data_offsets;
        for case in 0..pikv_test::scaled(300, 20_000) {
            let mut bytes = file.clone();
            for _ in 0..1 + rng.below(2) {
                let at = 8 + n + from + 4 * rng.below(((to - from) / 4) as u32) as usize;
                let word = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
                let word = match rng.below(5) {
                    0 => word ^ 1 << rng.below(32),
                    1 => word.wrapping_add(1),
                    2 => word.wrapping_sub(1),
                    3 => rng.below(1000),
                    _ => u32::MAX,
                };
                bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
            let end = bytes.len() - 32;
            let restored = match pikv.restore(&mut &bytes[..]) {
                Err(LoopError::Cache(Error::Save(SaveError::Sum { actual, .. }))) => {
                    for (to, i) in bytes[end..].iter_mut().zip(0..) {
                        *to = u8::from_str_radix(&actual[2 * i..2 * i + 2], 16).unwrap();
                    }
                    pikv.restore(&mut &bytes[..])
                }
                restored => restored,
            };
            match restored {
                Ok(Restored { mut sequence, .. }) => {
                    taken += 1;
                    sequence.rollback(rng.below(sequence.rollback_limit() + 1)).unwrap();
                    let _ = pikv.routers();
                    go_on(&mut pikv, &mut sequence, case as u64, 2);
                }
                Err(error) => {
                    let typed = matches!(
                        &error,
                        LoopError::Cache(Error::Save(SaveError::Content { tensor, .. })) if tensor == "routers"
                    );
                    assert!(typed || matches!(error, LoopError::Route { .. }), "{case}: {error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 100 && taken > 20, "{refused} {taken}");
}

/// The committed files of the versions that have routers are restored, and saving the same loop writes the same bytes. The fifth is of more
/// experts than have runs.
#[test]
fn the_files_of_versions_with_routers() {
    for (version, experts) in [(3, EXPERTS), (5, 12)] {
        let cache = Cache::new(config(2).experts(experts as u32, 2).rollback(4)).unwrap();
        let of = || -> ClosedLoop {
            let shape = Shape::new(experts as u32, 2);
            let router =
                |layer| -> Box<dyn Router> { Box::new(Adaptive::new(2, 3 + layer).router(shape).unwrap()) };
            ClosedLoop::new(cache.clone(), (0..LAYERS as u64).map(router).collect()).unwrap()
        };
        let mut pikv = of();
        let mut sequence = cache.sequence();
        for step in 0..5 {
            turn(&mut pikv, &mut sequence, 2, step, ReadPages::All);
        }
        let file = saved_file(version, &saved(&mut pikv, &sequence));
        let mut twin = of();
        let mut restored = twin.restore(&mut &file[..]).unwrap().sequence;
        assert_eq!(go_on(&mut twin, &mut restored, 1, 20), go_on(&mut pikv, &mut sequence, 1, 20));
    }
}
