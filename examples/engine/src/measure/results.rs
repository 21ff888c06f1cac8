//! Rows of `benches/results`: each says where, when and by what it was measured.

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
    /// A file with these columns, of rows that `binary` of this package makes with the arguments of this process.
    ///
    /// # Errors
    /// No git, or no repository.
    pub fn new(path: PathBuf, columns: &str, binary: &str) -> Result<Sheet> {
        let text = format!("{columns},machine,date,commit,command\n");
        Ok(Sheet { path, text, columns: columns.split(',').count(), origin: origin(binary)? })
    }

    /// Adds a row, whose cells are apart by commas, and writes the file, so that a run that is ended leaves what it measured.
    ///
    /// # Errors
    /// The file's.
    ///
    /// # Panics
    /// If there are more or fewer cells than columns.
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

/// Machine, day, commit (with a plus where the sources are not those of the commit) and command.
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

/// A path's last part: where a file lies on this machine is nobody's business.
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

/// CPU time of this process, all threads together: ratios of it do not depend on what else the machine does.
pub fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec that this function owns, and the call writes nothing else.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "every POSIX system has this clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
