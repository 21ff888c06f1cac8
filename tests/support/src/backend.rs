//! The back end of suites that run on any: the CPU, or with PIKV_TEST_BACKEND=cuda a device; PIKV_LIBCUDA may name the stand-in for
//! its driver, as `.ci/run` does.

use pikv::Backend;
use std::sync::OnceLock;

/// One for all tests of a binary.
pub fn backend() -> Backend {
    static BACKEND: OnceLock<Backend> = OnceLock::new();
    let open = || match std::env::var("PIKV_TEST_BACKEND").as_deref() {
        Ok("cuda") => Backend::cuda().unwrap_or_else(|e| panic!("{e}")),
        Ok(other) if other != "cpu" => panic!("no back end {other:?}"),
        _ => Backend::CPU,
    };
    BACKEND.get_or_init(open).clone()
}
