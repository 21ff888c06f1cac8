//! The table on the terminal, and the rows of `benches/results/attend.csv`.

use crate::timing::Timing;
use crate::{HEAD_DIM, QUERY_HEADS, machine};
use pikv::lanes::Lanes;
use std::error::Error;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/results/attend.csv");
const COLUMNS: &str = "machine,lanes,dtype,context,batch,threads,kv_gbps,read_gbps,fma_gbps,roof_ratio,rows,tokens_per_s,over_sum,date,commit,command";
/// Columns that tell a row's configuration: machine to threads, and rows.
const KEY: [usize; 7] = [0, 1, 2, 3, 4, 5, 10];

/// A configuration and its medians.
pub struct Row {
    pub lanes: Lanes,
    pub form: &'static str,
    /// Tokens of all sequences together.
    pub context: u32,
    pub batch: usize,
    /// Query rows a sequence.
    pub rows: u32,
    pub threads: usize,
    /// KV bytes of all sequences, counted once a call whatever the rows.
    pub bytes: f64,
    pub timing: Timing,
}

/// Rows as they come.
pub struct Record {
    machine: String,
    when: String,
    lines: Vec<String>,
}

impl Record {
    pub fn new() -> std::io::Result<Record> {
        let machine = machine::name();
        println!("{machine}\n");
        println!(
            "{:7} {:5} {:>7} {:>5} {:>4} {:>3} {:>8} {:>7} {:>8} {:>6} {:>9} {:>8}  spread",
            "lanes",
            "dtype",
            "context",
            "batch",
            "rows",
            "thr",
            "KV GB/s",
            "read",
            "FMA",
            "/ roof",
            "tokens/s",
            "/ sum"
        );
        let when = machine::when("cargo bench -p pikv-benches --bench attend")?;
        Ok(Record { machine, when, lines: Vec::new() })
    }

    pub fn add(&mut self, row: Row) {
        let Row { lanes, form, context, batch, rows, threads, bytes, timing } = row;
        let rate = bytes / timing.seconds / 1e9;
        // A row does not see those that follow it.
        let looks = f64::from(rows) * (f64::from(context) - f64::from(rows - 1) / 2.0);
        let fmas = looks * (2 * HEAD_DIM * QUERY_HEADS) as f64;
        let (read, fma) = (timing.machine.read_gbps, timing.machine.fmas_per_s / fmas * bytes / 1e9);
        let ratio = rate / read.min(fma);
        let tokens = f64::from(rows) * batch as f64 / timing.seconds;
        let sum = timing.over_sum.map(|over| format!("{over:.3}")).unwrap_or_default();
        let (lanes, spread) = (lanes.name(), timing.spread);
        println!(
            "{lanes:7} {form:5} {context:>7} {batch:>5} {rows:>4} {threads:>3} {rate:>8.2} {read:>7.2} {fma:>8.2} \
             {ratio:>6.3} {tokens:>9.1} {sum:>8}  {spread:.0} %"
        );
        self.lines.push(format!(
            "{},{lanes},{form},{context},{batch},{threads},{rate:.3},{read:.3},{fma:.3},{ratio:.4},{rows},{tokens:.2},{sum},{}",
            self.machine, self.when
        ));
    }

    /// Puts the rows in the place of those of the same configurations.
    pub fn write(self) -> Result<(), Box<dyn Error>> {
        println!("\nspread: of the middle half of the samples, over the median");
        println!("/ sum: time over what the bytes take at the rate of the longest sequence alone");
        machine::replace_rows(PATH, COLUMNS, KEY, &self.lines)?;
        println!("written to benches/results/attend.csv");
        Ok(())
    }
}
