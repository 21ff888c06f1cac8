//! Temporary directories of tests.

use std::fs;
use std::path::{Path, PathBuf};

/// A directory of a test's own, empty, and removed with it.
pub struct Dir(pub PathBuf);

impl Dir {
    /// `name` and the number of the process in `parent`, the suite's `CARGO_TARGET_TMPDIR`.
    pub fn new(parent: &str, name: &str) -> Dir {
        let dir = Path::new(parent).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Dir(dir.canonicalize().unwrap())
    }

    /// The names of the files in it, in order.
    pub fn names(&self) -> Vec<String> {
        let names = fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}
