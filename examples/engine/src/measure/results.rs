//! Rows of `benches/results`, each with the machine, day, commit and command of the measurement.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;
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
        Ok(Sheet { path, text, columns: columns.split(',').count(), origin: origin(binary)? })
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

/// Machine, day, commit (with a plus if sources differ from it) and command.
fn origin(binary: &str) -> Result<String> {
    let said = |program: &str, arguments: &[&str]| -> Result<String> {
        let out = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
        if !out.status.success() {
            return Err(format!("{program} {}: {}", arguments.join(" "), out.status).into());
        }
        Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let top = said("git", &["rev-parse", "--show-toplevel"])?;
    let changed = said("git", &["-C", &top, "status", "--porcelain", "--untracked-files=no", "--", "*.rs"])?;
    let plus = if changed.is_empty() { "" } else { "+" };
    let (date, commit) = (said("date", &["-u", "+%F"])?, said("git", &["rev-parse", "--short", "HEAD"])?);
    let arguments: Vec<String> = std::env::args().skip(1).map(|a| name_of(&a)).collect();
    let arguments = if arguments.is_empty() { String::new() } else { format!(" -- {}", arguments.join(" ")) };
    let command = format!("cargo run --release -p pikv-examples --bin {binary}{arguments}");
    Ok(format!("\"{}\",{date},{commit}{plus},{}", machine(), command.replace([',', '"'], " ")))
}

/// The last part of an absolute path, so that results do not name directories of this machine.
fn name_of(argument: &str) -> String {
    let path = std::path::Path::new(argument);
    match path.file_name() {
        Some(name) if path.is_absolute() => name.to_string_lossy().into_owned(),
        _ => argument.to_owned(),
    }
}

/// Processor, cores and lanes.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let lanes = pikv::lanes::Lanes::detect().name();
    format!("{}, {cores} cores, {lanes}", model.trim_start_matches([' ', '\t', ':']))
}

/// CPU time of this process over all threads; ratios of it do not depend on other load.
pub fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec owned by this function, and the call writes only it.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "every POSIX system has this clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
