//! Code shared by tests.
#![allow(clippy::new_without_default, clippy::should_implement_trait, reason = "nobody but tests uses it")]

pub mod backend;
pub mod dir;
pub mod gguf_writer;
pub mod numbers;
pub mod routers;
pub mod runs;
pub mod twins;

use proptest::prelude::ProptestConfig;

/// Whether the whole matrix is requested: the variable PIKV_TEST is `full`.
pub fn full() -> bool {
    std::env::var("PIKV_TEST").as_deref() == Ok("full")
}

/// `quick`, or `full` where [the whole matrix](full) is asked for.
pub fn scaled<T>(quick: T, all: T) -> T {
    if full() { all } else { quick }
}

/// The committed saved sequence of a version of the format, which has to be `now`. It is made anew where the variable PIKV_WRITE_SAVED is
/// set: with a version that is not written yet.
///
/// # Panics
/// If the file differs, or is missing.
pub fn saved_file(version: u32, now: &[u8]) -> Vec<u8> {
    let name = format!("../save/version_{version}.safetensors");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    if std::env::var_os("PIKV_WRITE_SAVED").is_some() {
        std::fs::write(&path, now).unwrap();
    }
    let file = std::fs::read(path).unwrap();
    assert!(file == now, "what is written differs from what version {version} was: it needs another number");
    file
}

/// Random cases of a property: [`scaled`], or as many as the variable PROPTEST_CASES says. Failures are printed, not kept.
pub fn cases(quick: u32, all: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok());
    ProptestConfig {
        cases: asked.unwrap_or_else(|| scaled(quick, all)),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}
