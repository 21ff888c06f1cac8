//! Orders in which threads take the locks of a cache: pages move between ranks while other threads step, fork and drop; a thread prefetches
//! pages of lower tiers.
//!
//! `shuttle` runs the threads one at a time and chooses at each lock which one continues. It needs its own locks in place of the standard
//! library's, so these tests exist only with `--cfg pikv_shuttle`:
//!
//! ```text
//! RUSTFLAGS="--cfg pikv_shuttle" cargo test -p pikv-orders --target-dir target/orders
//! ```
//!
//! The variable `PIKV_ORDERS` sets the number of orders that each test tries.

#![cfg(all(test, pikv_shuttle))]

mod moves;
mod prefetch;

use pikv::{Attend, AttendOutput, Cache, Error, Position, Rows, Sequence};
use pikv_test::numbers::{bits, noise};

const DIM: usize = 4;

/// Number of orders that a test tries, `quick` by default.
fn orders(quick: usize) -> usize {
    std::env::var("PIKV_ORDERS").ok().and_then(|n| n.parse().ok()).unwrap_or(quick)
}

/// The keys or values of `n` tokens from position `from` on, the same for the same salt.
fn rows(salt: u64, from: u32, n: u32) -> Vec<f32> {
    (from..from + n).flat_map(|position| noise(salt + u64::from(position), DIM)).collect()
}

/// Bits of a row over all that a sequence holds in `layer`.
fn read(cache: &Cache, layer: usize, sequence: &Sequence) -> Result<Vec<u32>, Error> {
    let mut out = [0.0; DIM];
    let rows = [Rows::new(sequence, Position(sequence.next_position().0 - 1), 1)];
    cache.attend(layer, &rows, &noise(7, DIM), &Attend::new(0.5), AttendOutput::new(&mut out))?;
    Ok(bits(&out))
}
