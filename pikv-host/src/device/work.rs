//! Buffers of launches: uploads, partial results, and results for the host.

use crate::base::error::Error;
use crate::base::rope_tables::{Table, Turns};
use crate::codec::Map;
use crate::device::memory::{Memory, Pinned};

use crate::device::ring::{Ring, Upload};
use crate::device::stream::Stream;

use pikv_core::codec::read::Back;
use pikv_kernels::args::MapArg;
use std::sync::Arc;

/// Buffers of launches.
#[derive(Debug, Default)]
pub struct WorkBuffers {
    ring: Ring,
    queries: Memory,
    parts: Memory,
    raw: Memory,
    out: Memory,
    scratch: Memory,
    back: Pinned,
    /// RoPE tables: rotation of a cache, positions, and memory.
    tables: Vec<(Arc<Turns>, u32, Memory)>,
    /// Maps of codecs.
    maps: Vec<(Map, Direction, MapArg, Memory)>,
}

/// Direction of a map, which selects one of its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To stored channels.
    Store,
    /// Back, for 32 tokens.
    Back,
    /// Back, for a sum of tokens: the transposed matrix.
    Sum,
}

impl WorkBuffers {
    /// Copies words to their addresses.
    pub fn write(&mut self, stream: &Stream, targets: &[(u64, &[u32])]) -> Result<(), Error> {
        self.ring.write(stream, targets)
    }

    /// Uploads lists; returns the address of the first.
    pub fn send(&mut self, stream: &Stream, upload: &Upload<'_>) -> Result<u64, Error> {
        self.ring.send(stream, upload)
    }

    /// Buffer for the gathered queries of a wave.
    pub fn queries(&mut self, stream: &Stream, floats: u64) -> Result<u64, Error> {
        self.queries.reserve(floats * 4, stream)
    }

    /// Buffer for the partial results of a wave.
    pub fn parts(&mut self, stream: &Stream, floats: u64) -> Result<u64, Error> {
        self.parts.reserve(floats * 4, stream)
    }

    /// Buffer for the weights of a wave.
    pub fn raw(&mut self, stream: &Stream, floats: u64) -> Result<u64, Error> {
        self.raw.reserve(floats * 4, stream)
    }

    /// Buffer for results.
    pub fn out(&mut self, stream: &Stream, floats: u64) -> Result<u64, Error> {
        self.out.reserve(floats * 4, stream)
    }

    /// Scratch buffer of kernels; the next launch that needs one reuses it.
    pub fn scratch(&mut self, stream: &Stream, bytes: u64) -> Result<u64, Error> {
        self.scratch.reserve(bytes, stream)
    }

    /// A map in one direction.
    pub fn map(&mut self, stream: &Stream, map: Option<&Map>, direction: Direction) -> Result<MapArg, Error> {
        let Some(map) = map else { return Ok(MapArg::NONE) };
        let known = |of: &&(Map, Direction, MapArg, Memory)| of.1 == direction && of.0.is(map);
        if let Some((_, _, known, _)) = self.maps.iter().find(known) {
            return Ok(*known);
        }
        let (wide, narrow) = (map.wide(), map.narrow());
        let none = MapArg { wide, narrow, ..MapArg::NONE };
        let (form, table, bias) = match map.back() {
            Back::Hadamard { block } => {
                return Ok(MapArg { form: MapArg::HADAMARD, block: block as u32, ..none });
            }
            Back::Select { channels } => (MapArg::SELECT, channels.to_vec(), &[][..]),
            Back::Dense { decode, bias } => {
                let column = |c: usize| decode.iter().skip(c).step_by(narrow as usize);
                let table: Vec<f32> = match direction {
                    Direction::Store => map.encode().into_owned(),
                    Direction::Back => decode.to_vec(),
                    Direction::Sum => (0..narrow as usize).flat_map(column).copied().collect(),
                };
                (MapArg::DENSE, bytemuck::cast_slice(&table).to_vec(), bias)
            }
            _ => unreachable!("the forms of a map"),
        };
        let words = [&table, bytemuck::cast_slice::<f32, u32>(bias)].concat();
        let memory = Memory::new(size_of_val(&words[..]) as u64)?;
        self.write(stream, &[(memory.address(), &words)])?;
        let (at, bytes) = (memory.address(), size_of_val(&table[..]) as u64);
        let bias = if bias.is_empty() { 0 } else { at + bytes };
        let argument = MapArg { form, table: at, bias, ..none };
        // Maps that no codec uses are freed, after waiting for kernels that may read them.
        if self.maps.iter().any(|(map, ..)| map.is_last()) {
            stream.synchronize()?;
            self.maps.retain(|(map, ..)| !map.is_last());
        }
        self.maps.push((map.clone(), direction, argument, memory));
        Ok(argument)
    }

    /// Address of a RoPE table. Caches on a device have tables of their own, also where their rotations are equal.
    pub fn table(&mut self, stream: &Stream, table: &Table) -> Result<u64, Error> {
        let known =
            |of: &&(Arc<Turns>, u32, Memory)| Arc::ptr_eq(&of.0, table.turns()) && of.1 == table.capacity();
        if let Some((.., memory)) = self.tables.iter().find(known) {
            return Ok(memory.address());
        }
        let values = table.values();
        let memory = Memory::new(size_of_val(values) as u64)?;
        // SAFETY: the memory has the length of `values`, which stay borrowed until the copy is done: the call waits for it.
        unsafe { stream.up(memory.address(), bytemuck::cast_slice(values))? };
        stream.synchronize()?;
        // All work is done, so an older, shorter table has no readers, nor have those of dropped caches, whose rotations are held
        // here alone.
        self.tables.retain(|(turns, ..)| !Arc::ptr_eq(turns, table.turns()) && Arc::strong_count(turns) > 1);
        let address = memory.address();
        self.tables.push((table.turns().clone(), table.capacity(), memory));
        Ok(address)
    }

    /// Waits for all work, and calls `f` with `words` words from `address`.
    pub fn fetch<T>(
        &mut self,
        stream: &Stream,
        address: u64,
        words: usize,
        f: impl FnOnce(&[u32]) -> T,
    ) -> Result<T, Error> {
        self.fetch_all(stream, &[(address, words)], f)
    }

    /// [`WorkBuffers::fetch`] from several places; `f` gets their words in order.
    pub fn fetch_all<T>(
        &mut self,
        stream: &Stream,
        places: &[(u64, usize)],
        f: impl FnOnce(&[u32]) -> T,
    ) -> Result<T, Error> {
        let all = places.iter().map(|(_, words)| words).sum();
        let host = &mut self.back.reserve(all)?[..all];
        // SAFETY: `host` has the length of all places, and is read only after the stream is synchronized.
        unsafe { stream.down(places.iter().map(|(address, words)| (*address, 4 * words)), host)? };
        stream.synchronize()?;
        Ok(f(host))
    }
}
