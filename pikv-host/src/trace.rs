//! Token streams with the experts of each token and the positions that its query attends to: recorded, replayed or synthetic. For
//! studies of caches without a model.
//!
//! A trace is a CSV file: a header, then a line for each token, lists separated by blanks:
//!
//! ```text
//! token,experts of 16,wanted
//! 17,3 5,
//! 4,3 0,0
//! ```
//! `wanted` are earlier positions with the largest attention masses in a recorded run, or draws from a distribution. A trace contains
//! the tokens of prompts, so [`TraceFile`] makes files that only their owner can read.

use crate::base::files::Private;
use pikv_core::hash::next;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::Path;
use thiserror::Error;

/// One token of a stream. Its position is its index in the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Row {
    /// Token id.
    pub token: u32,
    /// Experts of the token, first choice first.
    pub experts: Vec<u16>,
    /// Positions that the token's query attends to, all before its own.
    pub wanted: Vec<u32>,
}

impl Row {
    /// A row of these fields.
    pub fn new(token: u32, experts: Vec<u16>, wanted: Vec<u32>) -> Row {
        Row { token, experts, wanted }
    }
}

/// Errors of reading, writing or generating a trace.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// Error of the file.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The first line is not a valid header.
    #[error("the first line is {found:?}; a trace begins with \"token,experts of N,wanted\", N in 1..=65535")]
    Header {
        /// The first line as read, or as it would have been written.
        found: String,
    },
    /// A line that is not a valid row.
    #[error("line {line}: {what} {found:?}; it must be {expected}")]
    Row {
        /// Line number, from 1.
        line: usize,
        /// Part of the row: `the row`, `token`, `experts` or `wanted`.
        what: &'static str,
        /// Text of that part.
        found: String,
        /// Accepted values.
        expected: String,
    },
    /// A parameter of a [`Skewed`] stream is out of range.
    #[error("{name} {value}; it must be {range}")]
    Value {
        /// Field name.
        name: &'static str,
        /// Value given.
        value: f64,
        /// Accepted values.
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
    /// Writes the header of a trace of a model with `experts` experts.
    ///
    /// # Errors
    /// [`TraceError::Header`] unless `experts` is in 1..=65535; [`TraceError::Io`].
    pub fn new(mut out: W, experts: u32) -> Result<Writer<W>, TraceError> {
        let header = header(experts);
        if experts == 0 || experts > u32::from(u16::MAX) {
            return Err(TraceError::Header { found: header });
        }
        writeln!(out, "{header}")?;
        Ok(Writer { out, experts, line: 1 })
    }

    /// Writes a row.
    ///
    /// # Errors
    /// [`TraceError::Row`] for a row that a [`Reader`] would refuse; nothing is written. [`TraceError::Io`].
    pub fn write(&mut self, row: &Row) -> Result<(), TraceError> {
        check(row, self.experts, self.line + 1)?;
        self.line += 1;
        let Row { token, experts, wanted } = row;
        writeln!(self.out, "{token},{},{}", list(experts), list(wanted))?;
        Ok(())
    }

    /// Flushes the trace and returns the file.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn finish(mut self) -> Result<W, TraceError> {
        self.out.flush()?;
        Ok(self.out)
    }
}

/// A buffered file for a [`Writer`] that only its owner can read (mode 0600).
///
/// Writes past the process's limit of file sizes (`RLIMIT_FSIZE`) return an error of kind
/// [`FileTooLarge`](io::ErrorKind::FileTooLarge) and raise no `SIGXFSZ`.
#[derive(Debug)]
pub struct TraceFile(BufWriter<Private>);

impl TraceFile {
    /// Creates the file at `path`. A file that exists there is unlinked; processes that have it open do not see the new one.
    ///
    /// # Errors
    /// Errors of the file system; `path` is something other than a file, such as a link or a device (open such a path yourself for
    /// [`Writer::new`]).
    pub fn create(path: impl AsRef<Path>) -> io::Result<TraceFile> {
        Ok(TraceFile(BufWriter::new(Private::create(path.as_ref())?)))
    }

    /// Flushes the buffer, and waits until the data would survive a loss of power.
    ///
    /// # Errors
    /// Errors of the file system.
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
    /// Reads the header.
    ///
    /// # Errors
    /// [`TraceError::Header`] if it is not valid; [`TraceError::Io`].
    pub fn new(file: R) -> Result<Reader<R>, TraceError> {
        let mut lines = file.lines();
        let found = lines.next().transpose()?.unwrap_or_default();
        let experts = found.strip_prefix("token,experts of ").and_then(|rest| rest.strip_suffix(",wanted"));
        match experts.and_then(|n| n.parse::<u16>().ok()).filter(|n| *n > 0) {
            Some(n) => Ok(Reader { lines, experts: n.into(), line: 1 }),
            None => Err(TraceError::Header { found }),
        }
    }

    /// Number of experts of the model.
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

/// Checks that experts exist and none repeats, and that wanted positions precede the token's own.
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

/// An endless synthetic stream with an uneven use of experts that changes over time. Equal parameters give equal streams.
///
/// The expert of rank `r` (from 1) is drawn with weight `r^-skew`, those of one token without replacement. Every `drift` tokens a
/// rank drawn by the same weights swaps experts with a rank drawn uniformly, so mostly the hot experts cool down. A query
/// attends to the token `d` positions back with weight `1/d`; it draws `wants` times, and equal draws count once.
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
    /// Experts of each token, 1..=experts.
    pub top_k: u32,
    /// Exponent of the weights, 0 to 16: 0 is uniform, 1 is Zipf's law.
    pub skew: f64,
    /// Tokens between swaps of ranks; 0 for no swaps.
    pub drift: u32,
    /// Draws of wanted positions for each query, 0..=65535.
    pub wants: u32,
    /// Number of token ids, drawn uniformly; at least 1.
    pub vocabulary: u32,
    /// Seed of the random draws.
    pub seed: u64,
}

setters!(Skewed { experts: u32, top_k: u32, skew: f64, drift: u32, wants: u32, vocabulary: u32, seed: u64 });

impl Default for Skewed {
    /// 2 of 16 experts by Zipf's law, a swap every 64 tokens, 4 draws for each query, 32000 token ids, seed 0.
    fn default() -> Skewed {
        Skewed { experts: 16, top_k: 2, skew: 1.0, drift: 64, wants: 4, vocabulary: 32000, seed: 0 }
    }
}

impl Skewed {
    /// The stream from its first token.
    ///
    /// # Errors
    /// [`TraceError::Value`] for a field out of range.
    pub fn rows(self) -> Result<TraceRows, TraceError> {
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
        Ok(TraceRows { options: self, weights, by_rank, position: 0, state: self.seed })
    }
}

/// The rows of a [`Skewed`] stream.
#[derive(Clone, Debug)]
pub struct TraceRows {
    options: Skewed,
    weights: Vec<f64>,
    by_rank: Vec<u16>,
    position: u32,
    state: u64,
}

impl TraceRows {
    /// The expert of each rank at the next token, most used first.
    pub fn by_rank(&self) -> &[u16] {
        &self.by_rank
    }

    /// Uniform in 0..1.
    fn unit(&mut self) -> f64 {
        (next(&mut self.state) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..n.
    fn below(&mut self, n: u32) -> u32 {
        ((u128::from(next(&mut self.state)) * u128::from(n)) >> 64) as u32
    }

    /// Draws a rank outside `without` by its weight.
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

impl Iterator for TraceRows {
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
                // `position` to a uniform power has a uniform logarithm: weight 1/d.
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
