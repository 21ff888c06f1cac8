//! Faults of a device: no memory, a refused launch, a lost device. Each gives a typed error; the cache continues as if the call had not
//! been made, or fails for good; nothing is leaked.

use crate::script::{Op, Options, Run};
use crate::standin::{Get, Set, Standin};
use crate::suite::{config, shape};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::cuda::CudaError;
use pikv::policy::{Budget, Eviction, KeyNorm};
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Backend, Cache, CacheConfig, Dtype, Error};
use pikv_test::scaled;

fn setup() -> CacheConfig {
    config(
        vec![shape(1, 2, 8, 8, Dtype::Bf16, Dtype::F16), shape(2, 1, 12, 4, Dtype::F32, Dtype::F32)],
        20,
        4,
    )
    .experts(2, 1)
}

fn ops() -> Vec<Op> {
    vec![
        Op::Feed(vec![(0, 45)]),
        Op::Fork(0),
        Op::Feed(vec![(0, 1), (1, 3)]),
        Op::Ask(1, 2),
        Op::Abandon(vec![(0, 20)], 1),
        Op::Feed(vec![(0, 50)]),
        Op::Feed(vec![(1, 1)]),
    ]
}

fn reference(setup: &CacheConfig, ops: &[Op], options: Options) -> Vec<u32> {
    let mut run = Run::new(setup.clone(), options).unwrap();
    ops.iter().for_each(|op| run.act(op).unwrap());
    run.look().unwrap();
    run.record
}

/// Injects one fault at a time, at the `n`th chance: it must give an error, and the repeated call must succeed. With `again` an append is
/// repeated in its step, else the step.
fn recovers(
    setup: &CacheConfig,
    ops: &[Op],
    fault: Set,
    again: bool,
    expected: impl Fn(&Error) -> bool,
) -> u64 {
    let options = Options { again, ..Options::default() };
    let (faults, unseen) = each_fault(setup, ops, fault, options, expected);
    assert_eq!(unseen, 0, "faults that did not show");
    faults
}

/// [`recovers`] for faults that may stay unseen: returns the number of faults, and of those overcome unseen.
fn each_fault(
    setup: &CacheConfig,
    ops: &[Op],
    fault: Set,
    options: Options,
    expected: impl Fn(&Error) -> bool,
) -> (u64, u64) {
    let standin = Standin::new();
    let want = reference(setup, ops, options);
    let mut unseen = 0;
    let live = standin.get(Get::Live);
    for n in (0..).step_by(scaled(4, 1)) {
        let backend = standin.backend();
        standin.set(fault, n);
        let mut run = Run::new(setup.clone().backend(backend), options).unwrap();
        let mut failed = 0;
        for op in ops {
            let used = run.cache.usage();
            if let Err(e) = run.act(op) {
                assert!(expected(&e), "{n}, {op:?}: {e:?}");
                // Pages demoted for a step stay in their tier.
                if !options.anywhere {
                    assert_eq!(run.cache.usage(), used, "{n}, {op:?}: pages of a step that failed are kept");
                }
                failed += 1;
                run.act(op).unwrap_or_else(|e| panic!("{n}, {op:?} again: {e}"));
            }
        }
        assert!(run.failed.iter().all(&expected), "{n}: {:?}", run.failed);
        failed += run.failed.len();
        // Looking reads through a buffer, which may need its memory here.
        let before = run.record.len();
        if let Err(e) = run.look() {
            assert!(expected(&e), "{n}: {e:?}");
            failed += 1;
            run.record.truncate(before);
            run.look().unwrap();
        }
        assert!(run.record == want, "{n}: what came out after the fault differs from the CPU");
        drop(run);
        assert_eq!(standin.get(Get::Live), live, "{n}: something was not given back");
        let due = standin.get(Get::Due);
        standin.set(Set::Reset, 0);
        if due > 0 {
            assert_eq!(failed, 0);
            return (n, unseen);
        }
        assert!(failed < 2);
        unseen += 1 - failed as u64;
    }
    unreachable!("a number of faults that does not end")
}

#[test]
fn memory_that_is_refused() {
    let refused = |e: &Error| matches!(e, Error::OutOfMemory { bytes: 1.. });
    let n = recovers(&setup(), &ops(), Set::Allocations, false, refused);
    // Chunks of two page sizes, and every buffer.
    assert!(n > 6, "{n} allocations");
    // Pages so large that chunks begin at any head: a token is then filed for some heads and not for others.
    let layers = vec![shape(3, 1, 256, 256, Dtype::F32, Dtype::F32)];
    for ring in [20, 31] {
        let large = config(layers.clone(), ring, 0);
        let options = Options { again: true, ..Options::default() };
        let ops = vec![Op::Fill(vec![(0, 31)]); 14];
        let (n, unseen) = each_fault(&large, &ops, Set::Allocations, options, refused);
        // A chunk that a run would have had for itself is not missed while others have free pages.
        assert!(n > 4 && unseen <= n / 4, "{n} allocations, {unseen} unseen");
    }
}

#[test]
fn launches_that_are_refused() {
    let refused =
        |e: &Error| matches!(e, Error::Device(CudaError::Driver { call: "cuLaunchKernel", code: 701, .. }));
    for again in [false, true] {
        let n = recovers(&setup(), &ops(), Set::Launches, again, refused);
        assert!(n > 40, "{n} launches");
    }
}

/// A fault while pages are packed, or their extremes taken, leaves no trace.
#[test]
fn faults_while_pages_are_packed() {
    let codec = |map| Codec::new(Coding::new(Code::Int8).map(map), Coding::new(Code::E4m3));
    let matrix = |n| (0..n).map(|i| (i % 7) as f32 * 0.3 - 0.9).collect::<Vec<f32>>();
    let dense = Map::new(8, 4, matrix(32), matrix(32), Some(matrix(8))).unwrap();
    let packed = setup().compress_layer(0, codec(dense)).key_bounds(true);
    let ops = [
        Op::Feed(vec![(0, 45)]),
        Op::Feed(vec![(0, 38)]),
        Op::Fork(0),
        Op::Feed(vec![(1, 35), (0, 1)]),
        Op::Feed(vec![(1, 1)]),
    ];
    let refused = |e: &Error| matches!(e, Error::OutOfMemory { bytes: 1.. });
    let n = recovers(&packed, &ops, Set::Allocations, true, refused);
    assert!(n > 10, "{n} allocations");
    let refused = |e: &Error| matches!(e, Error::Device(CudaError::Driver { call: "cuLaunchKernel", .. }));
    let n = recovers(&packed, &ops, Set::Launches, false, refused);
    assert!(n > 40, "{n} launches");
}

/// Pages that could not be compacted stay as they are. The tokens held are those of the CPU, whatever page they are in.
#[test]
fn faults_while_pages_are_put_together() {
    let standin = Standin::new();
    // By the norms of keys, which no order of sums bears on.
    let thinned = setup().experts(1, 1).evict(Eviction::new(KeyNorm, Budget::Tokens(80)).batch(9));
    let ops = [45, 60, 50, 5, 5].map(|n| Op::Fill(vec![(0, n)]));
    let held = |run: &Run| {
        let mut all = Vec::new();
        for (layer, head) in [(0, 0), (1, 0), (1, 1)] {
            let mut of = Vec::new();
            for page in run.sequences[0].pages(layer, head).unwrap() {
                of.extend(run.sequences[0].positions(layer, head, page.id).unwrap().map(|(_, at)| at));
            }
            of.sort();
            all.push(of);
        }
        all
    };
    let mut cpu = Run::new(thinned.clone(), Options::default()).unwrap();
    ops.iter().for_each(|op| cpu.act(op).unwrap());
    let want = held(&cpu);
    let live = standin.get(Get::Live);
    for fault in [Set::Allocations, Set::Launches] {
        let mut unseen = 0;
        for n in 0.. {
            let backend = standin.backend();
            standin.set(fault, n);
            let mut run = Run::new(thinned.clone().backend(backend), Options::default()).unwrap();
            let failed = ops.iter().filter(|op| run.act(op).is_err_and(|_| run.act(op).is_ok())).count();
            assert!(held(&run) == want, "{n}: other tokens are held");
            let due = standin.get(Get::Due);
            standin.set(Set::Reset, 0);
            run.act(&Op::Feed(vec![(0, 1)])).unwrap();
            run.look().unwrap();
            drop(run);
            assert_eq!(standin.get(Get::Live), live, "{n}: something was not given back");
            if due > 0 {
                break;
            }
            assert!(failed < 2, "{n}");
            unseen += 1 - failed;
        }
        assert!(unseen > 0, "nothing was put together");
    }
}

/// Pages that could not be prefetched are read late; pages that cannot be moved stay.
#[test]
fn faults_on_the_way_between_tiers() {
    let mut tiered = setup().tiers(Tiers::new().host(1 << 20)).experts(1, 1).rollback(0);
    tiered.budget = 26 * tiered.layers[1].layout.bytes();
    let mut ops = vec![Op::Fill(vec![(0, 30)]); 6];
    ops.extend([Op::Promote(0, 4000), Op::Feed(vec![(0, 1)]), Op::Demote(0, 4000), Op::Feed(vec![(0, 1)])]);
    let options = Options { anywhere: true, ..Options::default() };
    let expected = |e: &Error| match e {
        Error::OutOfMemory { bytes: 1.. } => true,
        Error::Device(CudaError::Driver { call: "cuLaunchKernel", code: 701, .. }) => true,
        other => panic!("{other:?}"),
    };
    for fault in [Set::Allocations, Set::Launches] {
        let (faults, unseen) = each_fault(&tiered, &ops, fault, options, expected);
        assert!(faults > 10 && unseen < faults / 2, "{faults} faults, {unseen} unseen");
    }
}

#[test]
fn a_device_that_is_lost() {
    let standin = Standin::new();
    let live = standin.get(Get::Live);
    for n in [0, 1, 2, 5, 11, 23] {
        let mut run = Run::new(setup().backend(standin.backend()), Options::default()).unwrap();
        standin.set(Set::Lose, n);
        let lost = |e: &Error| matches!(e, Error::Device(CudaError::Driver { code: 719, .. }));
        let ops = ops();
        assert!(ops.iter().any(|op| run.act(op).is_err_and(|e| lost(&e))), "{n}: it shows");
        let len = run.sequences[0].next_position();
        // The loss is permanent, and the host's tables stay unchanged.
        for op in [Op::Feed(vec![(0, 1)]), Op::Ask(0, 1), Op::Feed(vec![(0, 30)])] {
            match run.act(&op) {
                Err(e) => assert!(lost(&e), "{n}, {op:?}: {e:?}"),
                // There is nothing to ask an empty sequence for.
                Ok(()) => assert!(matches!(op, Op::Ask(..)) && len.0 == 0, "{n}, {op:?}"),
            }
        }
        assert_eq!(run.sequences[0].next_position(), len);
        assert!(matches!(run.look(), Err(e) if lost(&e)) || len.0 == 0);
        drop(run);
        standin.set(Set::Reset, 0);
        assert_eq!(standin.get(Get::Live), live, "{n}: something was not given back");
    }
    // Another back end is another device.
    let mut run = Run::new(setup().backend(standin.backend()), Options::default()).unwrap();
    ops().iter().for_each(|op| run.act(op).unwrap());
    run.look().unwrap();
    assert!(run.record == reference(&setup(), &ops(), Options::default()));
}

#[test]
fn a_back_end_that_cannot_be_built_leaves_nothing() {
    let standin = Standin::new();
    let live = standin.get(Get::Live);
    standin.set(Set::Capability, 50);
    let error = Backend::cuda().unwrap_err();
    let expected = CudaError::Capability { device: "PTX interpreter".into(), major: 5, minor: 0 };
    assert_eq!(error, expected);
    assert_eq!(standin.get(Get::Live), live);
}

#[test]
fn values_that_do_not_fit_are_named_as_on_the_cpu() {
    let standin = Standin::new();
    let mut errors = Vec::new();
    for backend in [Backend::CPU, standin.backend()] {
        let config = config(vec![shape(2, 1, 3, 2, Dtype::F16, Dtype::F16)], 8, 0).backend(backend);
        let cache = Cache::new(config).unwrap();
        let mut sequence = cache.sequence();
        let mut step = cache.begin([(&mut sequence, 2)]).unwrap();
        let (mut k, mut v) = (vec![0.5; 12], vec![0.25; 8]);
        (k[10], v[1]) = (7e4, f32::NAN);
        errors.push(step.append(0, &k, &v).map_err(|e| e.to_string()).unwrap_err());
        (k[10], v[1]) = (1.0, 1.0);
        step.append(0, &k, &v).unwrap();
        let mut out = [0.0; 8];
        step.attend(0, &[0.0; 12], &Attend::new(1.0), AttendOutput::new(&mut out)).unwrap();
        errors.push(format!("{out:?}"));
        let overflow =
            step.attend(0, &[3e38; 12], &Attend::new(1.0), AttendOutput::new(&mut out)).unwrap_err();
        errors.push(overflow.to_string());
    }
    let (cpu, cuda) = errors.split_at(3);
    assert_eq!(cpu, cuda);
}

#[test]
fn steps_of_a_known_size_allocate_nothing_and_wait_once_a_layer() {
    let standin = Standin::new();
    let mut run = Run::new(setup().backend(standin.backend()), Options::default()).unwrap();
    for _ in 0..3 {
        run.act(&Op::Feed(vec![(0, 1)])).unwrap();
    }
    let (allocated, waited) = (standin.get(Get::Allocated), standin.get(Get::Waited));
    for _ in 0..5 {
        run.act(&Op::Feed(vec![(0, 1)])).unwrap();
    }
    assert_eq!(standin.get(Get::Allocated), allocated);
    // The host waits only where attention returns results: 2 layers.
    assert_eq!(standin.get(Get::Waited) - waited, 5 * 2);
}
