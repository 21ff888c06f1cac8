//! Tables of cosines and sines, one for each rotation in use, grown as sequences grow.

use crate::error::Error;
use crate::frequencies::{Frequencies, turn};
use arc_swap::ArcSwap;
use pikv_core::plan::LayerShape;
use pikv_core::rope::{Rope, Rotation};
use std::fmt;
use std::sync::Arc;

/// The tables of a cache.
#[derive(Debug)]
pub(crate) struct Tables {
    /// One for each rotation.
    tables: Vec<(Turns, ArcSwap<Table>)>,
    /// Of each layer, its table.
    of: Vec<Option<usize>>,
}

/// How pairs of channels turn.
#[derive(Clone, Debug, PartialEq)]
struct Turns {
    rope: Rope,
    scaled: Option<Frequencies>,
}

/// A table and the positions in it.
pub(crate) struct Table {
    values: Vec<f32>,
    capacity: u32,
    /// Which of the cache's tables it is.
    #[cfg(feature = "cuda")]
    index: usize,
}

impl Tables {
    /// Of these layers, with the frequencies of those that have their own.
    pub fn new(layers: &[LayerShape], frequencies: &[Option<Frequencies>]) -> Tables {
        let (mut tables, mut of): (Vec<(Turns, ArcSwap<Table>)>, _) = (Vec::new(), Vec::new());
        for (rope, scaled) in layers.iter().map(|layer| layer.rope).zip(frequencies) {
            let Some(rope) = rope else {
                of.push(None);
                continue;
            };
            let turns = Turns { rope, scaled: scaled.clone() };
            let known = tables.iter().position(|(known, _)| *known == turns);
            of.push(Some(known.unwrap_or_else(|| {
                let first = ArcSwap::from_pointee(Table::first(&turns, tables.len()));
                tables.push((turns, first));
                tables.len() - 1
            })));
        }
        Tables { tables, of }
    }

    fn table(&self, layer: usize) -> Option<(usize, &(Turns, ArcSwap<Table>))> {
        let index = self.of.get(layer).copied().flatten()?;
        Some((index, &self.tables[index]))
    }

    /// Makes the table of a layer's rotation reach position `last`, which is [`Position::MAX`](pikv_core::page::Position::MAX) or below. The
    /// caller holds so many tokens: the table takes [`Tables::bytes_at`] and a time in proportion.
    ///
    /// # Errors
    /// No memory for it.
    pub fn grow(&self, layer: usize, last: u32) -> Result<(), Error> {
        let Some((index, (turns, table))) = self.table(layer) else { return Ok(()) };
        if last >= table.load().capacity {
            let grown = Arc::new(Table::new(turns, capacity(last), index)?);
            // Another step may have come further meanwhile.
            table.rcu(|table| if table.capacity < grown.capacity { &grown } else { table }.clone());
        }
        Ok(())
    }

    /// Bytes of a table that reaches position `last`.
    pub fn bytes_at(rope: &Rope, last: u32) -> u64 {
        4 * u64::from(rope.rotary_dim) * u64::from(capacity(last))
    }

    /// Bytes of all tables.
    pub fn bytes(&self) -> u64 {
        self.tables.iter().map(|(_, table)| 4 * table.load().values.capacity() as u64).sum()
    }

    /// That of a layer. Without a lock: a reader keeps the table that it found.
    pub fn get(&self, layer: usize) -> Option<Arc<Table>> {
        let (_, (_, table)) = self.table(layer)?;
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
    fn first(turns: &Turns, index: usize) -> Table {
        let factor = turns.scaled.as_ref().map_or(1.0, Frequencies::factor) as f32;
        let values = [factor, 0.0].repeat(turns.rope.rotary_dim as usize / 2);
        Table::of(values, 1, index)
    }

    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn of(values: Vec<f32>, capacity: u32, index: usize) -> Table {
        Table {
            values,
            capacity,
            #[cfg(feature = "cuda")]
            index,
        }
    }

    /// Angles in f64, so that they are right at any position; each value is rounded once. libm's functions, not std's, whose
    /// last bit differs from platform to platform.
    fn new(turns: &Turns, capacity: u32, index: usize) -> Result<Table, Error> {
        let Turns { rope, scaled } = turns;
        let pairs = rope.rotary_dim / 2;
        let len = 2 * pairs as usize * capacity as usize;
        let mut values = Vec::new();
        values.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { bytes: 4 * len as u64 })?;
        for i in 0..pairs {
            let (turn, factor) = match scaled {
                None => (turn(rope.theta, rope.rotary_dim, i), 1.0),
                Some(scaled) => (scaled.inverse()[i as usize], scaled.factor()),
            };
            values.extend((0..capacity).map(|p| (factor * libm::cos(f64::from(p) * turn)) as f32));
            values.extend((0..capacity).map(|p| (factor * libm::sin(f64::from(p) * turn)) as f32));
        }
        Ok(Table::of(values, capacity, index))
    }

    #[cfg(feature = "cuda")]
    pub fn index(&self) -> usize {
        self.index
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
