//! RoPE tables of cosines and sines, one for each rotation in use, which grow with the sequences.

use crate::base::error::Error;
use crate::base::frequencies::{Frequencies, turn};
use arc_swap::ArcSwap;
use pikv_core::page::Position;
use pikv_core::plan::LayerShape;
use pikv_core::rope::{Rope, Rotation};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// RoPE tables of a cache.
#[derive(Debug)]
pub(crate) struct Tables {
    /// One for each rotation.
    tables: Vec<Growing>,
    /// Index of each layer's table.
    of: Vec<Option<usize>>,
}

/// A table, and its successor of twice as many positions: positions in the second half of the table compute a share of the successor,
/// so that no step computes all of it.
#[derive(Debug)]
struct Growing {
    turns: Arc<Turns>,
    table: ArcSwap<Table>,
    next: Mutex<Option<Begun>>,
}

/// A table with its first `done` positions computed.
struct Begun {
    table: Table,
    done: u32,
}

/// Rotation of pairs of channels. Tables of one cache with one rotation share it; caches do not.
#[derive(Debug, PartialEq)]
pub(crate) struct Turns {
    rope: Rope,
    scaled: Option<Frequencies>,
}

/// Cosines and sines for each pair and position.
pub(crate) struct Table {
    values: Box<[f32]>,
    capacity: u32,
    turns: Arc<Turns>,
}

impl Tables {
    /// Tables for these layers, with the frequencies of layers that have scaled RoPE.
    pub fn new(layers: &[LayerShape], frequencies: &[Option<Frequencies>]) -> Tables {
        let (mut tables, mut of): (Vec<Growing>, _) = (Vec::new(), Vec::new());
        for (rope, scaled) in layers.iter().map(|layer| layer.rope).zip(frequencies) {
            let Some(rope) = rope else {
                of.push(None);
                continue;
            };
            let turns = Turns { rope, scaled: scaled.clone() };
            let known = tables.iter().position(|known| *known.turns == turns);
            of.push(Some(known.unwrap_or_else(|| {
                let turns = Arc::new(turns);
                let table = ArcSwap::from_pointee(Table::first(&turns));
                tables.push(Growing { turns, table, next: Mutex::default() });
                tables.len() - 1
            })));
        }
        Tables { tables, of }
    }

    fn table(&self, layer: usize) -> Option<&Growing> {
        Some(&self.tables[self.of.get(layer).copied().flatten()?])
    }

    /// Grows the table of a layer to position `last`, at most [`Position::MAX`](pikv_core::page::Position::MAX). For a `last` that the
    /// caller holds tokens for: memory is bounded by [`Tables::bytes_at`], and time is proportional to the new tokens.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn grow(&self, layer: usize, last: u32) -> Result<(), Error> {
        match self.table(layer) {
            Some(growing) => growing.reach(last),
            None => Ok(()),
        }
    }

    /// [`Tables::grow`] for a length from a peer or a file: refuses a table of more than `most` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the bytes of the table.
    pub fn grow_within(&self, layer: usize, last: u32, most: u64) -> Result<(), Error> {
        let Some(growing) = self.table(layer) else { return Ok(()) };
        let bytes = Tables::bytes_at(&growing.turns.rope, last);
        if bytes > most && growing.table.load().capacity <= last {
            return Err(Error::OutOfMemory { bytes });
        }
        growing.reach(last).map_err(|_| Error::OutOfMemory { bytes })
    }

    /// Largest number of bytes for a table up to position `last`: its own, and those of its successor, which is twice as long.
    pub fn bytes_at(rope: &Rope, last: u32) -> u64 {
        3 * 4 * u64::from(rope.rotary_dim) * u64::from(capacity(last))
    }

    /// Bytes of all tables.
    pub fn bytes(&self) -> u64 {
        let of = |growing: &Growing| {
            let next = growing.next().as_ref().map_or(0, |next| next.table.values.len());
            4 * (growing.table.load().values.len() + next) as u64
        };
        self.tables.iter().map(of).sum()
    }

    /// The table of a layer. Takes no lock: a reader keeps the table that it loaded.
    pub fn get(&self, layer: usize) -> Option<Arc<Table>> {
        Some(self.table(layer)?.table.load_full())
    }
}

impl Growing {
    fn next(&self) -> MutexGuard<'_, Option<Begun>> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Tables::grow`] for this table.
    fn reach(&self, last: u32) -> Result<(), Error> {
        let present = self.table.load_full();
        let half = present.capacity / 2;
        if last < half || present.capacity < SMALLEST || present.capacity > Position::MAX.0 / 2 {
            return if last < present.capacity { Ok(()) } else { self.jump(last) };
        }
        let mut next = self.next();
        if self.table.load().capacity != present.capacity {
            // Another step replaced the table meanwhile.
            drop(next);
            return self.reach(last);
        }
        let begun = match &mut *next {
            Some(begun) => begun,
            none => none.insert(Begun { table: Table::empty(&self.turns, 2 * present.capacity)?, done: 0 }),
        };
        // Four positions for each position of the second half, so that the successor is complete when the table is full.
        let until = (u64::from(last - half) + 1) * 4;
        let until = until.min(u64::from(begun.table.capacity)) as u32;
        if until > begun.done {
            begun.table.fill(&self.turns, begun.done..until);
            begun.done = until;
        }
        if last < present.capacity {
            return Ok(());
        }
        if let Some(Begun { table, .. }) = next.take().filter(|begun| last < begun.table.capacity) {
            self.table.store(Arc::new(table));
            return Ok(());
        }
        drop(next);
        self.jump(last)
    }

    /// Computes a table up to `last` at once.
    fn jump(&self, last: u32) -> Result<(), Error> {
        let mut table = Table::empty(&self.turns, capacity(last))?;
        table.fill(&self.turns, 0..table.capacity);
        let grown = Arc::new(table);
        // Another step may have stored a longer table meanwhile.
        self.table.rcu(|table| if table.capacity < grown.capacity { &grown } else { table }.clone());
        *self.next() = None;
        Ok(())
    }
}

/// Fewest positions of a table, after the first token.
const SMALLEST: u32 = 256;

/// Positions of a table that reaches `last`.
fn capacity(last: u32) -> u32 {
    (last + 1).next_power_of_two().max(SMALLEST)
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

impl fmt::Debug for Begun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Begun").field("table", &self.table).field("done", &self.done).finish()
    }
}

impl Table {
    /// The table of position 0 alone, for empty sequences.
    fn first(turns: &Arc<Turns>) -> Table {
        let factor = turns.scaled.as_ref().map_or(1.0, Frequencies::factor) as f32;
        let values = [factor, 0.0].repeat(turns.rope.rotary_dim as usize / 2);
        Table::of(values.into(), 1, turns)
    }

    fn of(values: Box<[f32]>, capacity: u32, turns: &Arc<Turns>) -> Table {
        Table { values, capacity, turns: turns.clone() }
    }

    /// A table with no position computed.
    fn empty(turns: &Arc<Turns>, capacity: u32) -> Result<Table, Error> {
        let len = turns.rope.rotary_dim as usize / 2 * 2 * capacity as usize;
        // Zeroed memory of the system, cleared at the first write.
        let values = bytemuck::allocation::try_zeroed_slice_box(len);
        let values = values.map_err(|()| Error::OutOfMemory { bytes: 4 * len as u64 })?;
        Ok(Table::of(values, capacity, turns))
    }

    /// Computes positions. Angles are f64, precise at every position, and each value is rounded once. Uses libm's functions, because the
    /// last bit of std's differs between platforms.
    fn fill(&mut self, turns: &Turns, positions: Range<u32>) {
        let Turns { rope, scaled } = turns;
        let n = self.capacity as usize;
        for (i, pair) in (0..).zip(self.values.chunks_exact_mut(2 * n)) {
            let (turn, factor) = match scaled {
                None => (turn(rope.theta, rope.rotary_dim, i), 1.0),
                Some(scaled) => (scaled.inverse()[i as usize], scaled.factor()),
            };
            let (cosines, sines) = pair.split_at_mut(n);
            let of = positions.start as usize..positions.end as usize;
            for (p, x) in positions.clone().zip(&mut cosines[of.clone()]) {
                *x = (factor * libm::cos(f64::from(p) * turn)) as f32;
            }
            for (p, x) in positions.clone().zip(&mut sines[of]) {
                *x = (factor * libm::sin(f64::from(p) * turn)) as f32;
            }
        }
    }

    pub fn turns(&self) -> &Arc<Turns> {
        &self.turns
    }

    pub fn values(&self) -> &[f32] {
        &self.values
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    pub fn rotation(&self, rope: Rope) -> Rotation<'_> {
        Rotation { rope, table: &self.values, capacity: self.capacity }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pikv_core::dtype::Dtype;

    #[test]
    fn lengths_from_outside_are_bounded() {
        let layer = LayerShape::new(1, 1, 8, Dtype::F32).rope(Rope::new(100.0, 8));
        let tables = Tables::new(&[layer], &[None]);
        let most = Tables::bytes_at(&Rope::new(100.0, 8), 1000);
        tables.grow_within(0, 1000, most).unwrap();
        assert!(tables.bytes() <= most);
        let error = tables.grow_within(0, 1 << 30, most).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { bytes } if bytes == (3 * 4 * 8) << 31), "{error}");
        assert!(tables.grow_within(0, 1024, most).is_err());
        tables.grow_within(0, 1023, 0).unwrap();
        assert!(tables.bytes() <= most);
    }

    /// A table that grows token by token equals one computed at once, and no step computes more than its own share and that of the step
    /// before.
    #[test]
    fn tables_grow_bit_by_bit() {
        let turns = Arc::new(Turns { rope: Rope::new(100.0, 4), scaled: None });
        for step in [1, 7, 300] {
            let first = ArcSwap::from_pointee(Table::first(&turns));
            let growing = Growing { turns: turns.clone(), table: first, next: Mutex::default() };
            let (mut last, mut before, mut checked) = (0, 0, 0);
            while last < 5000 {
                growing.reach(last).unwrap();
                let (table, next) = (growing.table.load_full(), growing.next());
                assert!(last < table.capacity);
                let values = table.values.len() + next.as_ref().map_or(0, |next| next.table.values.len());
                assert!(4 * values as u64 <= Tables::bytes_at(&turns.rope, last));
                let done = table.capacity + next.as_ref().map_or(0, |next| next.done);
                assert!(
                    done <= SMALLEST || step == 300 || done <= before + 8 * step,
                    "{done} after {before}"
                );
                if table.capacity != checked {
                    checked = table.capacity;
                    let mut whole = Table::empty(&turns, checked).unwrap();
                    whole.fill(&turns, 0..checked);
                    let bits = |table: &Table| table.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&whole), bits(&table));
                }
                (last, before) = (last + step, done);
            }
        }
    }
}
