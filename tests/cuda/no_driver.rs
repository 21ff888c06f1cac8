//! Without a driver the back end returns an error that says so, and the CPU works.

use pikv::Backend;
use pikv::cuda::CudaError;

#[test]
fn says_which_library_is_missing() {
    // SAFETY: the only test of this binary; nothing else has read the environment.
    unsafe { std::env::set_var("PIKV_LIBCUDA", "libno-such-driver.so") };
    match Backend::cuda() {
        Err(CudaError::NoLibrary { name, reason }) => {
            assert_eq!(name, "libno-such-driver.so");
            assert!(reason.contains("libno-such-driver.so"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(Backend::default().name(), "cpu");
}
