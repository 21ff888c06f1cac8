//! Rows of `benches/results`, each with the machine, day, commit and command of the measurement.

use super::rows::provenance;
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A CSV file of `benches/results` whose rows end with machine, day (UTC), commit and command.
pub struct Sheet {
    path: PathBuf,
    text: String,
    columns: usize,
    origin: String,
}

impl Sheet {
    /// Creates a file with these columns, for rows that `binary` of this package measures with the arguments of this process.
    ///
    /// # Errors
    /// Without git or a repository.
    pub fn new(path: PathBuf, columns: &str, binary: &str) -> Result<Sheet> {
        let text = format!("{columns},machine,date,commit,command\n");
        let origin = provenance(&command(&format!("-p pikv-examples --bin {binary}")))?;
        Ok(Sheet { path, text, columns: columns.split(',').count(), origin })
    }

    /// Adds a row of comma-separated cells and writes the file, so that rows survive an interrupted run.
    ///
    /// # Errors
    /// Errors of the file.
    ///
    /// # Panics
    /// If the number of cells is not the number of columns.
    pub fn row(&mut self, cells: &str) -> Result<()> {
        let quoted: String = cells.split('"').step_by(2).collect();
        assert_eq!(quoted.split(',').count(), self.columns, "{cells}");
        self.text += &format!("{cells},{}\n", self.origin);
        std::fs::write(&self.path, &self.text).map_err(|e| format!("{}: {e}", self.path.display()).into())
    }
}

/// The file `name` in `benches/results`.
pub fn file(name: &str) -> PathBuf {
    crate::example("../benches/results").join(name)
}

/// The command of this process: `cargo run --release` with `target`, such as `-p serve`, and its arguments.
pub fn command(target: &str) -> String {
    let arguments: Vec<String> = std::env::args().skip(1).map(|a| name_of(&a)).collect();
    let arguments = if arguments.is_empty() { String::new() } else { format!(" -- {}", arguments.join(" ")) };
    format!("cargo run --release {target}{arguments}")
}

/// The last part of an absolute path, so that results do not name directories of this machine.
fn name_of(argument: &str) -> String {
    let path = std::path::Path::new(argument);
    match path.file_name() {
        Some(name) if path.is_absolute() => name.to_string_lossy().into_owned(),
        _ => argument.to_owned(),
    }
}

/// CPU time of this process over all threads; ratios of it do not depend on other load.
pub fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec owned by this function, and the call writes only it.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "every POSIX system has this clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
