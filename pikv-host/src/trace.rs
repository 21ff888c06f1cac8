//! Streams of tokens, their experts, and what their queries look at: recorded, replayed, or made up. For studies of caches
//! without a model.
//!
//! A trace is a CSV file, a line a token after the header, lists separated by blanks:
//!
//! ```text
//! token,experts of 16,wanted
//! 17,3 5,
//! 4,3 0,0
//! ```
//! A trace holds the tokens of prompts, so a [`TraceFile`] is for its owner's eyes. `wanted` are positions of earlier tokens, those whose absence the query would feel: the largest attention masses of a recorded
//! run, or draws from a distribution.

use crate::base::files::Private;
use pikv_core::hash::next;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::Path;
use thiserror::Error;

/// One token of a stream. Its position is its index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Row {
    /// The token.
    pub token: u32,
    /// Its experts, first choice first.
    pub experts: Vec<u16>,
    /// Positions that its query looks at, all before its own.
    pub wanted: Vec<u32>,
}

impl Row {
    /// A token, its experts and the positions that its query looks at.
    pub fn new(token: u32, experts: Vec<u16>, wanted: Vec<u32>) -> Row {
        Row { token, experts, wanted }
    }
}

/// Why a trace cannot be read or made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A first line that is no header.
    #[error("the first line is {found:?}; a trace begins with \"token,experts of N,wanted\", N in 1..=65535")]
    Header {
        /// As found, or as it would have been written.
        found: String,
    },
    /// A line that is no row.
    #[error("line {line}: {what} {found:?}; it must be {expected}")]
    Row {
        /// The line, from 1.
        line: usize,
        /// Which part.
        what: &'static str,
        /// As found.
        found: String,
        /// What would do.
        expected: String,
    },
    /// A stream that cannot be made.
    #[error("{name} {value}; it must be {range}")]
    Value {
        /// Which number.
        name: &'static str,
        /// As given.
        value: f64,
        /// What would do.
        range: &'static str,
    },
}

/// Writes a trace row by row.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    experts: u32,
    line: usize,
}

impl<W: Write> Writer<W> {
    /// Begins a trace of a model with `experts` experts.
    ///
    /// # Errors
    /// Experts that are not 1..=65535; the file's.
    pub fn new(mut out: W, experts: u32) -> Result<Writer<W>, TraceError> {
        let header = header(experts);
        if experts == 0 || experts > u32::from(u16::MAX) {
            return Err(TraceError::Header { found: header });
        }
        writeln!(out, "{header}")?;
        Ok(Writer { out, experts, line: 1 })
    }

    /// Adds a row.
    ///
    /// # Errors
    /// A row that could not be read again; nothing is written then. The file's.
    pub fn write(&mut self, row: &Row) -> Result<(), TraceError> {
        check(row, self.experts, self.line + 1)?;
        self.line += 1;
        let Row { token, experts, wanted } = row;
        writeln!(self.out, "{token},{},{}", list(experts), list(wanted))?;
        Ok(())
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// The file's.
    pub fn finish(mut self) -> Result<W, TraceError> {
        self.out.flush()?;
        Ok(self.out)
    }
}

/// A file for a [`Writer`], buffered, which its owner alone can read (mode 0600).
///
/// Writes that would pass the size that the process may give a file (`RLIMIT_FSIZE`) are errors of kind
/// [`FileTooLarge`](io::ErrorKind::FileTooLarge), and raise no `SIGXFSZ`.
#[derive(Debug)]
pub struct TraceFile(BufWriter<Private>);

impl TraceFile {
    /// Makes the file at `path`. A file that is there loses its name, and who has it open sees nothing of the new one.
    ///
    /// # Errors
    /// The file system's; something else than a file at `path`, such as a link or a device ([`Writer::new`] takes those that you open
    /// yourself).
    pub fn create(path: impl AsRef<Path>) -> io::Result<TraceFile> {
        Ok(TraceFile(BufWriter::new(Private::create(path.as_ref())?)))
    }

    /// Writes out what is buffered, and waits until it would outlast a loss of power.
    ///
    /// # Errors
    /// The file system's.
    pub fn sync(&mut self) -> io::Result<()> {
        self.0.flush()?;
        self.0.get_ref().sync()
    }
}

impl Write for TraceFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Reads a trace row by row.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::trace::{Reader, Row};
/// let trace = "token,experts of 16,wanted\n17,3 5,\n4,3 0,0\n";
/// let reader = Reader::new(trace.as_bytes())?;
/// assert_eq!(reader.experts(), 16);
/// let rows = reader.collect::<Result<Vec<Row>, _>>()?;
/// assert_eq!(rows[1], Row::new(4, vec![3, 0], vec![0]));
/// # Ok::<(), pikv::trace::TraceError>(())
/// ```
#[derive(Debug)]
pub struct Reader<R> {
    lines: io::Lines<R>,
    experts: u32,
    line: usize,
}

impl<R: BufRead> Reader<R> {
    /// Begins to read.
    ///
    /// # Errors
    /// No header; the file's.
    pub fn new(file: R) -> Result<Reader<R>, TraceError> {
        let mut lines = file.lines();
        let found = lines.next().transpose()?.unwrap_or_default();
        let experts = found.strip_prefix("token,experts of ").and_then(|rest| rest.strip_suffix(",wanted"));
        match experts.and_then(|n| n.parse::<u16>().ok()).filter(|n| *n > 0) {
            Some(n) => Ok(Reader { lines, experts: n.into(), line: 1 }),
            None => Err(TraceError::Header { found }),
        }
    }

    /// Experts of the model.
    pub fn experts(&self) -> u32 {
        self.experts
    }

    fn row(&self, text: &str) -> Result<Row, TraceError> {
        let bad = |what, found: &str, expected: &str| TraceError::Row {
            line: self.line,
            what,
            found: found.to_owned(),
            expected: expected.to_owned(),
        };
        let parts: Vec<&str> = text.split(',').collect();
        let [token, experts, wanted] = parts[..] else {
            return Err(bad("the row", text, "token,experts,wanted"));
        };
        let row = Row {
            token: token.parse().map_err(|_| bad("token", token, "a number below 2^32"))?,
            experts: numbers(experts)
                .ok_or_else(|| bad("experts", experts, "numbers separated by blanks"))?,
            wanted: numbers(wanted).ok_or_else(|| bad("wanted", wanted, "numbers separated by blanks"))?,
        };
        check(&row, self.experts, self.line)?;
        Ok(row)
    }
}

impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Row, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.lines.next()?;
        self.line += 1;
        Some(text.map_err(TraceError::from).and_then(|text| self.row(&text)))
    }
}

fn header(experts: u32) -> String {
    format!("token,experts of {experts},wanted")
}

fn list(numbers: &[impl ToString]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn numbers<T: std::str::FromStr>(text: &str) -> Option<Vec<T>> {
    text.split_ascii_whitespace().map(|n| n.parse().ok()).collect()
}

/// Experts there are, each once; positions that came before.
fn check(row: &Row, experts: u32, line: usize) -> Result<(), TraceError> {
    let bad = |what, found: String, expected: String| Err(TraceError::Row { line, what, found, expected });
    let mut sorted = row.experts.clone();
    sorted.sort_unstable();
    let twice = sorted.windows(2).any(|pair| pair[0] == pair[1]);
    if sorted.last().is_none_or(|e| u32::from(*e) >= experts) || twice {
        return bad("experts", list(&row.experts), format!("at least 1, each below {experts}, none twice"));
    }
    let position = line - 2;
    match row.wanted.iter().find(|p| **p as usize >= position) {
        Some(p) => bad("wanted", p.to_string(), format!("positions before the token's own, {position}")),
        None => Ok(()),
    }
}

/// A stream whose experts are used unevenly, and not always the same ones; endless, and the same for the same numbers.
///
/// Expert of rank `r` (from 1) is drawn with weight `r^-skew`, a token's experts without putting back. Every `drift` tokens a
/// rank is drawn the same way and trades places with another, drawn evenly: so it is mostly the hot ones that cool down. A query
/// looks `d` tokens back with weight `1/d`, `wants` times (fewer where draws meet).
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::trace::Skewed;
/// let rows: Vec<_> = Skewed::default().experts(8).top_k(2).rows()?.take(100).collect();
/// assert_eq!(rows[99].experts.len(), 2);
/// assert!(rows[99].wanted.iter().all(|p| *p < 99));
/// # Ok::<(), pikv::trace::TraceError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Skewed {
    /// Experts, 1..=65535.
    pub experts: u32,
    /// Experts a token, 1..=experts.
    pub top_k: u32,
    /// 0 is even; Zipf's law is 1.
    pub skew: f64,
    /// Tokens from one trade of ranks to the next; never if 0.
    pub drift: u32,
    /// Looks back of a query, 0..=65535.
    pub wants: u32,
    /// Different tokens, drawn evenly; at least 1.
    pub vocabulary: u32,
    /// Of the draws.
    pub seed: u64,
}

setters!(Skewed { experts: u32, top_k: u32, skew: f64, drift: u32, wants: u32, vocabulary: u32, seed: u64 });

impl Default for Skewed {
    /// 2 of 16 experts by Zipf's law, a trade every 64 tokens, 4 looks back, 32000 tokens, seed 0.
    fn default() -> Skewed {
        Skewed { experts: 16, top_k: 2, skew: 1.0, drift: 64, wants: 4, vocabulary: 32000, seed: 0 }
    }
}

impl Skewed {
    /// The stream, from its beginning.
    ///
    /// # Errors
    /// A number out of range.
    pub fn rows(self) -> Result<Rows, TraceError> {
        let value = |name, value: f64, fine: bool, range| {
            if fine { Ok(()) } else { Err(TraceError::Value { name, value, range }) }
        };
        let Skewed { experts, top_k, skew, vocabulary, wants, .. } = self;
        let some = (1..=u32::from(u16::MAX)).contains(&experts);
        value("experts", experts.into(), some, "1..=65535")?;
        value("top_k", top_k.into(), (1..=experts).contains(&top_k), "1..=experts")?;
        value("skew", skew, (0.0..=16.0).contains(&skew), "0 to 16")?;
        value("wants", wants.into(), wants <= u32::from(u16::MAX), "0..=65535")?;
        value("vocabulary", vocabulary.into(), vocabulary > 0, "at least 1")?;
        let weights = (1..=experts).map(|rank| f64::from(rank).powf(-skew)).collect();
        let by_rank = (0..experts).map(|e| e as u16).collect();
        Ok(Rows { options: self, weights, by_rank, position: 0, state: self.seed })
    }
}

/// The rows of a [`Skewed`] stream.
#[derive(Clone, Debug)]
pub struct Rows {
    options: Skewed,
    weights: Vec<f64>,
    by_rank: Vec<u16>,
    position: u32,
    state: u64,
}

impl Rows {
    /// The expert of each rank at the next token, the most used first.
    pub fn by_rank(&self) -> &[u16] {
        &self.by_rank
    }

    /// In 0..1.
    fn unit(&mut self) -> f64 {
        (next(&mut self.state) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// In 0..n, evenly.
    fn below(&mut self, n: u32) -> u32 {
        ((u128::from(next(&mut self.state)) * u128::from(n)) >> 64) as u32
    }

    /// A rank, by its weight, that is not in `without`.
    fn rank(&mut self, without: &[usize]) -> usize {
        let free = |rank: &usize| !without.contains(rank);
        let all = 0..self.weights.len();
        let sum: f64 = all.clone().filter(free).map(|rank| self.weights[rank]).sum();
        let mut left = self.unit() * sum;
        let mut last = 0;
        for rank in all.filter(free) {
            last = rank;
            left -= self.weights[rank];
            if left < 0.0 {
                break;
            }
        }
        last
    }
}

impl Iterator for Rows {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        let Skewed { experts, top_k, drift, wants, vocabulary, .. } = self.options;
        if drift > 0 && self.position > 0 && self.position.is_multiple_of(drift) {
            let (hot, other) = (self.rank(&[]), self.below(experts) as usize);
            self.by_rank.swap(hot, other);
        }
        let token = self.below(vocabulary);
        let mut ranks = Vec::new();
        for _ in 0..top_k {
            let rank = self.rank(&ranks);
            ranks.push(rank);
        }
        let mut wanted = Vec::new();
        if self.position > 0 {
            for _ in 0..wants {
                // The power of an even draw is a distance whose logarithm is even: weight 1/d.
                let back = f64::from(self.position).powf(self.unit()).floor() as u32;
                let position = self.position - back.clamp(1, self.position);
                if !wanted.contains(&position) {
                    wanted.push(position);
                }
            }
        }
        self.position = self.position.checked_add(1)?;
        let experts = ranks.iter().map(|rank| self.by_rank[*rank]).collect();
        Some(Row { token, experts, wanted })
    }
}
