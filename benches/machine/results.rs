//! Rows of `results/*.csv`, with machine, day, commit and command. Benches of other workspaces and the examples' engine use this file too.

use std::io;
use std::path::Path;
use std::process::Command;

/// Median of `values`.
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Name of the machine: processor model and cores, without commas.
pub fn name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field =
        |key: &str| info.lines().find_map(|l| l.strip_prefix(key)?.split_once(':')).map(|(_, v)| v.trim());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let (family, model) = (field("cpu family").unwrap_or("?"), field("model\t").unwrap_or("?"));
    format!("{} family {family} model {model} x {cores}", field("model name").unwrap_or("unknown CPU"))
        .replace(',', " ")
}

/// The last columns of a row of results: `machine,date,commit,command`.
///
/// # Errors
/// The errors of [`when`].
pub fn provenance(command: &str) -> io::Result<String> {
    Ok(format!("{},{}", name(), when(command)?))
}

/// The last columns of a row that begins with the machine: `date,commit,command`, the day in UTC. The commit ends with a plus if Rust
/// sources differ from it. Commas and quotes of the command become spaces.
///
/// # Errors
/// Without git, or outside a repository.
pub fn when(command: &str) -> io::Result<String> {
    let said = |program: &str, arguments: &[&str]| {
        let out = Command::new(program).args(arguments).output();
        let out = out.map_err(|error| io::Error::new(error.kind(), format!("{program}: {error}")))?;
        match out.status.success() {
            true => Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned()),
            false => Err(io::Error::other(format!("{program} {}: {}", arguments.join(" "), out.status))),
        }
    };
    let top = said("git", &["rev-parse", "--show-toplevel"])?;
    let changed = said("git", &["-C", &top, "status", "--porcelain", "--untracked-files=no", "--", "*.rs"])?;
    let plus = if changed.is_empty() { "" } else { "+" };
    let (date, commit) = (said("date", &["-u", "+%F"])?, said("git", &["rev-parse", "--short", "HEAD"])?);
    Ok(format!("{date},{commit}{plus},{}", command.replace([',', '"'], " ")))
}

/// Writes rows to a CSV file with these columns, in the place of those that are alike in the columns `key`. Other rows stay.
///
/// # Errors
/// A file that is there and cannot be read, or cannot be written.
pub fn replace_rows<const N: usize>(
    path: impl AsRef<Path>,
    columns: &str,
    key: [usize; N],
    rows: &[String],
) -> io::Result<()> {
    let key = |row: &str| {
        let fields: Vec<&str> = row.split(',').collect();
        key.map(|i| fields.get(i).unwrap_or(&"").to_string())
    };
    let new: Vec<_> = rows.iter().map(|row| key(row)).collect();
    let old = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read?,
    };
    let kept = old.lines().skip(1).filter(|row| !new.contains(&key(row)));
    let all: Vec<&str> =
        std::iter::once(columns).chain(kept).chain(rows.iter().map(String::as_str)).collect();
    std::fs::write(path, all.join("\n") + "\n")
}
