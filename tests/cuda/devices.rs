//! Several devices of one host: each has its own memory; they are used in turn from one thread, and from many threads.

use crate::script::{Op, Options, Run};
use crate::standin::{Get, Set, Standin};
use crate::suite::{config, decode, shape};
use pikv::cuda::CudaError;
use pikv::{Backend, CacheConfig, Dtype, Error};
use std::ptr;

fn setup(device: u32) -> CacheConfig {
    // Each device has other shapes, so that using a tensor or page of another device fails.
    let layers = vec![shape(1 + device % 2, 2, 8 + 4 * device, 12, Dtype::Bf16, Dtype::F16); 2];
    config(layers, 16, 4).experts(2, 1)
}

fn ops() -> Vec<Op> {
    let mut ops = vec![Op::Feed(vec![(0, 60)]), Op::Fork(0), Op::Rollback(0, 3)];
    ops.extend(decode(4));
    ops.extend([Op::Feed(vec![(0, 40), (1, 2)]), Op::Drop(1), Op::Ask(0, 2)]);
    ops
}

fn run(device: u32, backend: &Backend) -> Run {
    Run::new(setup(device).backend(backend.clone()), Options::default()).unwrap()
}

fn want(device: u32) -> Vec<u32> {
    finish(run(device, &Backend::CPU), ops().iter())
}

fn finish<'o>(mut run: Run, ops: impl Iterator<Item = &'o Op>) -> Vec<u32> {
    ops.for_each(|op| run.act(op).unwrap());
    run.look().unwrap();
    run.record
}

#[test]
fn an_ordinal_that_does_not_exist_says_how_many_there_are() {
    for n in [1, 3] {
        let standin = Standin::with_devices(n);
        assert_eq!(Backend::cuda_devices(), Ok(n));
        let error = Backend::cuda_device(n).unwrap_err();
        assert_eq!(error, CudaError::Ordinal { ordinal: n, devices: n });
        assert_eq!(error.to_string(), format!("no CUDA device {n}: the driver counts {n}, from 0"));
        assert_eq!(standin.get(Get::Live), 0);
        // The other devices exist, each with its own context.
        let backends = standin.backends();
        let live: Vec<u64> = (0..n).map(|i| standin.get_on(i, Get::Live)).collect();
        assert!(live.iter().all(|of| *of > 0 && *of == live[0]), "{live:?}");
        drop(backends);
        assert_eq!(standin.get(Get::Live), 0);
    }
    let standin = Standin::with_devices(0);
    assert_eq!(Backend::cuda_devices(), Err(CudaError::NoDevice));
    assert_eq!(standin.get(Get::Live), 0);
}

#[test]
fn one_thread_uses_devices_in_turn() {
    let standin = Standin::with_devices(3);
    let backends = standin.backends();
    let mut runs: Vec<Run> = (0..3).map(|i| run(i, &backends[i as usize])).collect();
    for op in ops() {
        runs.iter_mut().for_each(|run| run.act(&op).unwrap());
    }
    for (device, run) in (0..).zip(runs) {
        assert!(finish(run, [].iter()) == want(device), "device {device}");
        // It has no memory on another device.
        assert!(standin.get_on(device, Get::Launched) > 0);
    }
    drop(backends);
    for device in 0..3 {
        assert_eq!(standin.get_on(device, Get::Live), 0, "device {device}");
    }
}

#[test]
fn threads_use_devices_at_once() {
    let standin = Standin::with_devices(2);
    let backends = standin.backends();
    std::thread::scope(|scope| {
        // Two threads to a device, and pages that are given back on yet another thread.
        let threads: Vec<_> = (0..4u32)
            .map(|i| {
                let backend = &backends[i as usize % 2];
                scope.spawn(move || {
                    let mut run = run(i % 2, backend);
                    ops().iter().for_each(|op| run.act(op).unwrap());
                    run.look().unwrap();
                    run
                })
            })
            .collect();
        for (i, thread) in (0..).zip(threads) {
            let run = thread.join().unwrap();
            assert!(run.record == want(i % 2), "thread {i}");
        }
    });
    drop(backends);
    assert_eq!(standin.get(Get::Live), 0);
}

#[test]
fn a_device_that_is_lost_takes_no_other_along() {
    let standin = Standin::with_devices(2);
    let backends = standin.backends();
    let mut runs: Vec<Run> = (0..2).map(|i| run(i, &backends[i as usize])).collect();
    runs.iter_mut().for_each(|run| run.act(&ops()[0]).unwrap());
    standin.set_on(1, Set::Lose, 0);
    let (mut lost, mut kept) = (runs.pop().unwrap(), runs.pop().unwrap());
    for op in &ops()[1..] {
        kept.act(op).unwrap();
        if let Err(e) = lost.act(op) {
            assert!(matches!(e, Error::Device(CudaError::Driver { code: 719, .. })), "{op:?}: {e:?}");
        }
    }
    assert!(lost.look().is_err());
    assert!(finish(kept, [].iter()) == want(0));
    drop((lost, backends));
    assert_eq!(standin.get(Get::Live), 0);
}

/// The tests above rely on this: the stand-in tells devices apart.
#[test]
fn an_address_of_one_device_is_none_on_another() {
    type Context = extern "C" fn(*mut u64, i32) -> u32;
    type Allocate = extern "C" fn(*mut u64, usize) -> u32;
    type Stream = extern "C" fn(*mut u64, u32, i32) -> u32;
    type Up = extern "C" fn(u64, *const u32, usize, u64) -> u32;
    type Down = extern "C" fn(*mut u32, u64, usize) -> u32;
    type One = extern "C" fn(u64) -> u32;
    for wrong in ["stream", "up", "down", "free"] {
        let standin = Standin::with_devices(2);
        macro_rules! get {
            ($name:literal as $kind:ty) => {
                // SAFETY: the driver's signature.
                *unsafe { standin.library.get::<$kind>(concat!($name, "\0").as_bytes()) }.unwrap()
            };
        }
        let of = get!("cuDeviceGet" as extern "C" fn(*mut i32, i32) -> u32);
        let (retain, release) = (
            get!("cuDevicePrimaryCtxRetain" as Context),
            get!("cuDevicePrimaryCtxRelease_v2" as extern "C" fn(i32) -> u32),
        );
        let (current, allocate) = (get!("cuCtxSetCurrent" as One), get!("cuMemAlloc_v2" as Allocate));
        let (stream, up) = (get!("cuStreamCreateWithPriority" as Stream), get!("cuMemcpyHtoDAsync_v2" as Up));
        let (down, free) = (get!("cuMemcpyDtoH_v2" as Down), get!("cuMemFree_v2" as One));
        let (destroy, wait) = (get!("cuStreamDestroy_v2" as One), get!("cuStreamSynchronize" as One));
        let word = 7u32;
        let mut back = 0u32;
        let (mut devices, mut contexts, mut streams, mut address) = ([0; 2], [0; 2], [0; 2], 0);
        for i in 0..2 {
            assert_eq!(of(&mut devices[i], i as i32), 0);
            assert_eq!(retain(&mut contexts[i], devices[i]), 0);
            assert_eq!(current(contexts[i]), 0);
            assert_eq!(stream(&mut streams[i], 0, 0), 0);
        }
        assert_eq!(current(contexts[0]), 0);
        assert_eq!(allocate(&mut address, 4), 0);
        assert_eq!(up(address, ptr::from_ref(&word), 4, streams[0]), 0);
        assert_eq!((down(&mut back, address, 4), back), (0, 7));
        assert_eq!(current(contexts[1]), 0);
        match wrong {
            "stream" => assert_eq!(up(address, ptr::from_ref(&word), 4, streams[0]), 400),
            "up" => {
                assert_eq!(up(address, ptr::from_ref(&word), 4, streams[1]), 0);
                assert_eq!(wait(streams[1]), 0);
                assert_eq!(wait(streams[1]), 700);
            }
            "down" => assert_eq!(down(&mut back, address, 4), 700),
            _ => assert_eq!(free(address), 700),
        }
        // The other one is as it was.
        standin.set(Set::Reset, 0);
        assert_eq!(destroy(streams[1]), 0);
        assert_eq!(release(devices[1]), 0);
        assert_eq!(current(contexts[0]), 0);
        assert_eq!((down(&mut back, address, 4), back), (0, 7));
        assert_eq!((free(address), destroy(streams[0]), release(devices[0])), (0, 0, 0));
        assert_eq!(standin.get(Get::Live), 0);
    }
}
