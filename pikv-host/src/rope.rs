//! Tables of cosines and sines, one for each rotation in use, grown as sequences grow.

use crate::error::Error;
use arc_swap::ArcSwap;
use pikv_core::plan::LayerShape;
use pikv_core::rope::{Rope, Rotation};
use std::fmt;
use std::sync::Arc;

/// The tables of a cache.
#[derive(Debug)]
pub(crate) struct Tables(Vec<(Rope, ArcSwap<Table>)>);

/// A table and the positions in it.
pub(crate) struct Table {
    values: Vec<f32>,
    capacity: u32,
}

impl Tables {
    pub fn new(layers: &[LayerShape]) -> Tables {
        let mut tables: Vec<(Rope, ArcSwap<Table>)> = Vec::new();
        for rope in layers.iter().filter_map(|l| l.rope) {
            if tables.iter().all(|(known, _)| *known != rope) {
                tables.push((rope, ArcSwap::from_pointee(Table::first(&rope))));
            }
        }
        Tables(tables)
    }

    /// Makes the table of a rotation reach position `last`, which is [`Position::MAX`](pikv_core::page::Position::MAX) or below. The
    /// caller holds so many tokens: the table takes [`Tables::bytes`] and a time in proportion.
    ///
    /// # Errors
    /// No memory for it.
    pub fn grow(&self, rope: &Rope, last: u32) -> Result<(), Error> {
        let Some((rope, table)) = self.0.iter().find(|(known, _)| known == rope) else { return Ok(()) };
        if last >= table.load().capacity {
            let grown = Arc::new(Table::new(rope, capacity(last))?);
            // Another step may have come further meanwhile.
            table.rcu(|table| if table.capacity < grown.capacity { &grown } else { table }.clone());
        }
        Ok(())
    }

    /// Bytes of a table that reaches position `last`.
    pub fn bytes(rope: &Rope, last: u32) -> u64 {
        4 * u64::from(rope.rotary_dim) * u64::from(capacity(last))
    }

    /// Without a lock: a reader keeps the table that it found.
    pub fn get(&self, rope: &Rope) -> Option<Arc<Table>> {
        let (_, table) = self.0.iter().find(|(known, _)| known == rope)?;
        Some(table.load_full())
    }
}

/// Positions in a table that reaches `last`.
fn capacity(last: u32) -> u32 {
    (last + 1).next_power_of_two().max(256)
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

impl Table {
    /// Position 0 alone: what an empty sequence is asked at.
    fn first(rope: &Rope) -> Table {
        Table { values: [1.0, 0.0].repeat(rope.rotary_dim as usize / 2), capacity: 1 }
    }

    /// Angles in f64, so that they are right at any position; each value is rounded once. libm's functions, not std's, whose
    /// last bit differs from platform to platform.
    fn new(rope: &Rope, capacity: u32) -> Result<Table, Error> {
        let pairs = rope.rotary_dim / 2;
        let len = 2 * pairs as usize * capacity as usize;
        let mut values = Vec::new();
        values.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { bytes: 4 * len as u64 })?;
        for i in 0..pairs {
            let turn = libm::pow(rope.theta, -2.0 * f64::from(i) / f64::from(rope.rotary_dim));
            values.extend((0..capacity).map(|p| libm::cos(f64::from(p) * turn) as f32));
            values.extend((0..capacity).map(|p| libm::sin(f64::from(p) * turn) as f32));
        }
        Ok(Table { values, capacity })
    }

    #[cfg(feature = "cuda")]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    #[cfg(feature = "cuda")]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    pub fn rotation(&self, rope: Rope) -> Rotation<'_> {
        Rotation { rope, table: &self.values, capacity: self.capacity }
    }
}
