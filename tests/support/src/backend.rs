//! The back end of suites that run on any: the CPU, or with `PIKV_TEST_BACKEND=cuda` a device; `PIKV_LIBCUDA` may name the stand-in for its
//! driver, as `.ci/run` does.

use pikv::Backend;
use std::cell::OnceCell;
use std::sync::Mutex;

/// Devices in use at a time, at most: tests that run side by side take turns over them.
const DEVICES: usize = 8;

/// The back end of the calling thread: one for all that a test opens. Each device is opened once.
pub fn backend() -> Backend {
    thread_local! {
        static BACKEND: OnceCell<Backend> = const { OnceCell::new() };
    }
    BACKEND.with(|backend| backend.get_or_init(open).clone())
}

fn open() -> Backend {
    match std::env::var("PIKV_TEST_BACKEND").as_deref() {
        Ok("cuda") => next_device(),
        Ok(other) if other != "cpu" => panic!("no back end {other:?}"),
        _ => Backend::CPU,
    }
}

/// The devices one after the other.
fn next_device() -> Backend {
    static OPENED: Mutex<(usize, Vec<Backend>)> = Mutex::new((0, Vec::new()));
    let devices = Backend::cuda_devices().unwrap_or_else(|e| panic!("{e}")) as usize;
    let mut opened = OPENED.lock().unwrap_or_else(|e| panic!("{e}"));
    let at = opened.0 % devices.min(DEVICES);
    opened.0 += 1;
    if at == opened.1.len() {
        opened.1.push(Backend::cuda_device(at as u32).unwrap_or_else(|e| panic!("{e}")));
    }
    opened.1[at].clone()
}
