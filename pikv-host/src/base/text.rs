//! Text of reports: numbers with units, and tables of them.

use std::fmt;

/// Bytes with a binary unit: `800 B`, `1.5 MiB`.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0 as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
    }
}

/// A number with a decimal unit: `12.3 GB/s` of `Rate(12.3e9, "B/s")`.
pub struct Rate(pub f64, pub &'static str);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, 1000.0, &["", "k", "M", "G", "T", "P", "E"])?;
        f.write_str(self.1)
    }
}

/// Seconds: `1.5 ms`.
pub struct Seconds(pub f64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0.0 => f.write_str("0 s"),
            s if s < 1e-6 => write!(f, "{:.1} ns", s * 1e9),
            s if s < 1e-3 => write!(f, "{:.1} us", s * 1e6),
            s if s < 1.0 => write!(f, "{:.1} ms", s * 1e3),
            s => write!(f, "{s:.1} s"),
        }
    }
}

/// A part of a whole: `12.5 %`, or a dash if the whole is 0.
pub struct Share(pub f64, pub f64);

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            0.0 => f.write_str("-"),
            whole => write!(f, "{:.1} %", 100.0 * self.0 / whole),
        }
    }
}

/// A number below `base` with the first unit; a larger one with one decimal and the largest unit that fits.
fn scaled(f: &mut fmt::Formatter<'_>, number: f64, base: f64, units: &[&str]) -> fmt::Result {
    let (mut number, mut unit) = (number, 0);
    // 1023.95 KiB would print as 1024.0 KiB.
    while number.is_finite() && number >= base - if unit == 0 { 0.0 } else { 0.05 } && unit + 1 < units.len()
    {
        number /= base;
        unit += 1;
    }
    match unit {
        0 => write!(f, "{number} {}", units[0]),
        _ => write!(f, "{number:.1} {}", units[unit]),
    }
}

/// Rows of cells in columns, two blanks apart: the first left-aligned, the others right-aligned.
#[derive(Default)]
pub struct Table(Vec<Vec<String>>);

impl Table {
    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [&dyn fmt::Display; N]) {
        self.0.push(cells.iter().map(ToString::to_string).collect());
    }

    /// Adds a row of any length.
    pub fn cells(&mut self, cells: impl Iterator<Item = String>) {
        self.0.push(cells.collect());
    }
}

impl fmt::Display for Table {
    /// Writes no newline after the last row.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            self.0.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
        };
        for (i, row) in self.0.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = width(column).unwrap_or(0);
                line += &match column {
                    0 => format!("{cell:<width$}"),
                    _ => format!("  {cell:>width$}"),
                };
            }
            f.write_str(line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        let bytes = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, 256 << 20, u64::MAX];
        let said = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "256.0 MiB", "16.0 EiB"];
        assert_eq!(bytes.map(|n| Bytes(n).to_string()), said);
        let seconds = [0.0, 2.5e-7, 1.25e-5, 0.0015, 1.0, 61.04];
        assert_eq!(
            seconds.map(|s| Seconds(s).to_string()),
            ["0 s", "250.0 ns", "12.5 us", "1.5 ms", "1.0 s", "61.0 s"]
        );
        assert_eq!(Rate(12.34e9, "B/s").to_string(), "12.3 GB/s");
        assert_eq!(Rate(f64::INFINITY, "B/s").to_string(), "inf B/s");
        assert_eq!([Share(1.0, 8.0), Share(0.0, 0.0)].map(|share| share.to_string()), ["12.5 %", "-"]);
    }
}
