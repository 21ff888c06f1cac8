//! Global and shared memory: separate allocations, bytes that record whether they were written, words (or halves) that record by which
//! thread.

use super::{Atom, Cause};
use bytemuck::Pod;

/// Every allocation has its own 4 GiB of addresses, never given out again.
const SHIFT: u32 = 32;
/// Allocations of a device, in bits of their number.
const DEVICE: u32 = 17;
/// [`Word::reader`] of a word that warps of several blocks read.
const SEVERAL: u32 = u32::MAX;
/// Bit of [`Word::reader`] for several warps of one block, whose index is in the other bits.
const TOGETHER: u32 = 1 << 31;
/// [`Word::writer`] of a word that atomic operations change.
const ATOMIC: u32 = u32::MAX;

/// The thread that accesses memory.
#[derive(Clone, Copy, Debug)]
pub struct Who {
    /// Number of the launch.
    pub launch: u32,
    /// Index of the warp in the launch.
    pub warp: u32,
    /// Warps of a block.
    pub per_block: u32,
    /// Barriers that the warp passed; after one of the whole block, more than any of its warps had passed before.
    pub epoch: u32,
    /// The epoch that the last barrier of the whole block began.
    pub since: u32,
    /// Lanes that access the same address.
    pub lanes: u32,
}

impl Who {
    /// Whether an access by others, named as in [`Word`], comes before a barrier of the whole block that this warp has passed.
    #[inline(always)]
    fn follows(&self, other: u32, epoch: u32) -> bool {
        self.shares_block_with(other) && epoch < self.since
    }

    /// Whether the others, named as in [`Word`], are warps of this one's block.
    #[inline(always)]
    fn shares_block_with(&self, other: u32) -> bool {
        let block = if other & TOGETHER == 0 { (other - 1) / self.per_block } else { other & !TOGETHER };
        block == self.warp / self.per_block
    }
}

/// Accesses of one launch to a word.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    launch: u32,
    /// 1 + index of the warp; 0 for none.
    writer: u32,
    wrote: u32,
    write_epoch: u32,
    /// Like `writer`, or [`SEVERAL`], or [`TOGETHER`] with a block.
    reader: u32,
    read: u32,
    /// Of several readers the last epoch of any.
    read_epoch: u32,
}

impl Word {
    #[inline(always)]
    fn fresh(&mut self, launch: u32) {
        if self.launch != launch {
            *self = Word { launch, ..Word::default() };
        }
    }

    #[inline(always)]
    fn read(&mut self, address: u64, who: Who) -> Result<(), Cause> {
        self.fresh(who.launch);
        let me = who.warp + 1;
        if self.writer == me {
            if self.write_epoch == who.epoch && who.lanes & !self.wrote != 0 {
                return Err(Cause::LaneRace { address, others: self.wrote });
            }
        } else if self.writer != 0 && !who.follows(self.writer, self.write_epoch) {
            return Err(Cause::WarpRace { address, other: self.writer - 1 });
        }
        if self.reader == me && self.read_epoch == who.epoch {
            self.read |= who.lanes;
        } else if self.reader == 0 || self.reader == me || who.follows(self.reader, self.read_epoch) {
            // Whoever follows this read follows the earlier ones.
            (self.reader, self.read, self.read_epoch) = (me, who.lanes, who.epoch);
        } else {
            let block = TOGETHER | (who.warp / who.per_block);
            self.reader = if who.shares_block_with(self.reader) { block } else { SEVERAL };
            self.read_epoch = self.read_epoch.max(who.epoch);
        }
        Ok(())
    }

    /// `changes` if the word had another value before.
    #[inline(always)]
    fn write(&mut self, address: u64, who: Who, changes: bool) -> Result<(), Cause> {
        self.fresh(who.launch);
        let me = who.warp + 1;
        for (other, epoch) in [(self.writer, self.write_epoch), (self.reader, self.read_epoch)] {
            if other != 0 && other != me && !who.follows(other, epoch) {
                let other = if other & TOGETHER == 0 { other - 1 } else { SEVERAL };
                return Err(Cause::WarpRace { address, other });
            }
        }
        let here =
            |warp: u32, epoch: u32, lanes: u32| if warp == me && epoch == who.epoch { lanes } else { 0 };
        let wrote = here(self.writer, self.write_epoch, self.wrote);
        let read = here(self.reader, self.read_epoch, self.read);
        // All lanes may write the same; but what another lane has read may not be written before a barrier, even if it stays the same here.
        let others = (if changes { read | wrote } else { read }) & !who.lanes;
        if others != 0 {
            return Err(Cause::LaneRace { address, others });
        }
        (self.writer, self.wrote, self.write_epoch) = (me, wrote | who.lanes, who.epoch);
        Ok(())
    }
}

impl Word {
    /// An atomic operation, which may meet others but no plain access.
    fn atomic(&mut self, address: u64, launch: u32) -> Result<(), Cause> {
        self.fresh(launch);
        let plain = [self.writer, self.reader].into_iter().find(|who| *who != 0 && *who != ATOMIC);
        match (plain, self.reader) {
            (Some(other), _) if other & TOGETHER == 0 => Err(Cause::WarpRace { address, other: other - 1 }),
            (Some(_), _) | (None, SEVERAL) => Err(Cause::WarpRace { address, other: SEVERAL }),
            (None, _) => {
                self.writer = ATOMIC;
                Ok(())
            }
        }
    }
}

#[derive(Debug, Default)]
struct Allocation {
    bytes: Vec<u8>,
    /// 1 for a byte that was written.
    written: Vec<u8>,
    words: Vec<Word>,
    /// Whether an entry of `words` is of 2 bytes: lanes and warps access neighbouring halves of 4 bytes.
    halves: bool,
    freed: bool,
}

impl Allocation {
    /// The accesses to `size` bytes from `at` on.
    #[inline(always)]
    fn words(&mut self, at: usize, size: usize) -> &mut [Word] {
        if size < 4 && !self.halves {
            self.words = self.words.iter().flat_map(|word| [*word; 2]).collect();
            self.halves = true;
        }
        let bytes = if self.halves { 2 } else { 4 };
        &mut self.words[at / bytes..(at + size).div_ceil(bytes)]
    }
}

/// Global memory of a device.
#[derive(Debug, Default)]
pub struct Memory {
    /// Numbers of allocations before this device's own.
    first: usize,
    allocations: Vec<Allocation>,
    launches: u32,
}

impl Memory {
    /// The memory of a device by number: its addresses are out of bounds on every other.
    pub fn of(device: u32) -> Memory {
        Memory { first: (device as usize) << DEVICE, ..Memory::default() }
    }

    /// Whether `bytes` bytes from an address on lie in one allocation.
    pub fn holds(&self, address: u64, bytes: usize) -> bool {
        self.find(address, bytes).is_ok()
    }

    /// Shared memory of a block, from [`SHARED`](super::SHARED) on.
    pub(super) fn shared(bytes: usize) -> Memory {
        let mut memory = Memory { first: (super::SHARED >> SHIFT) as usize - 1, ..Memory::default() };
        memory.allocate(bytes);
        memory
    }

    /// Whether `address` is in shared memory.
    #[inline(always)]
    pub(super) fn is_shared(address: u64) -> bool {
        address >> SHIFT == super::SHARED >> SHIFT
    }

    /// Number of the next launch.
    pub(super) fn next_launch(&mut self) -> u32 {
        self.launches += 1;
        self.launches
    }

    /// Allocations that were not freed.
    pub fn live(&self) -> usize {
        self.allocations.iter().filter(|a| !a.freed).count()
    }

    /// Their bytes.
    pub fn bytes(&self) -> usize {
        self.allocations.iter().map(|a| a.bytes.len()).sum()
    }

    /// Allocates `bytes` uninitialised bytes, at a multiple of 4 GiB.
    pub fn allocate(&mut self, bytes: usize) -> u64 {
        self.allocations.push(Allocation {
            bytes: vec![0xa5; bytes],
            written: vec![0; bytes],
            words: vec![Word::default(); bytes.div_ceil(4)],
            halves: false,
            freed: false,
        });
        assert!(self.allocations.len() < 1 << DEVICE, "addresses of one device end here");
        ((self.first + self.allocations.len()) as u64) << SHIFT
    }

    /// An allocation that holds `data`.
    pub fn put<T: Pod>(&mut self, data: &[T]) -> u64 {
        let address = self.allocate(size_of_val(data));
        self.write(address, data).expect("it was just allocated");
        address
    }

    /// Frees the allocation at `address`; its addresses are never reused.
    pub fn free(&mut self, address: u64) -> Result<(), Cause> {
        let (index, at) = self.find(address, 0)?;
        if at != 0 {
            return Err(Cause::OutOfBounds { address });
        }
        self.allocations[index] = Allocation { freed: true, ..Allocation::default() };
        Ok(())
    }

    /// Copies from the host.
    pub fn write<T: Pod>(&mut self, address: u64, data: &[T]) -> Result<(), Cause> {
        let data: &[u8] = bytemuck::cast_slice(data);
        let (index, at) = self.find(address, data.len())?;
        let a = &mut self.allocations[index];
        a.bytes[at..at + data.len()].copy_from_slice(data);
        a.written[at..at + data.len()].fill(1);
        Ok(())
    }

    /// Copies to the host.
    pub fn read<T: Pod>(&self, address: u64, count: usize) -> Result<Vec<T>, Cause> {
        let size = count * size_of::<T>();
        let (index, at) = self.find(address, size)?;
        let a = &self.allocations[index];
        if let Some(i) = a.written[at..at + size].iter().position(|&w| w == 0) {
            return Err(Cause::Uninitialised { address: address + i as u64 });
        }
        Ok(a.bytes[at..at + size].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }

    /// Marks bytes as never written.
    pub fn forget(&mut self, address: u64, bytes: usize) -> Result<(), Cause> {
        let (index, at) = self.find(address, bytes)?;
        self.allocations[index].written[at..at + bytes].fill(0);
        Ok(())
    }

    /// Index of the allocation, and the offset in it, of `size` bytes at `address`.
    #[inline(always)]
    fn find(&self, address: u64, size: usize) -> Result<(usize, usize), Cause> {
        let index = ((address >> SHIFT) as usize).wrapping_sub(self.first + 1);
        let Some(a) = self.allocations.get(index) else {
            return Err(Cause::OutOfBounds { address });
        };
        let at = address as u32 as usize;
        if a.freed {
            return Err(Cause::Freed { address });
        }
        if at + size > a.bytes.len() {
            return Err(Cause::OutOfBounds { address });
        }
        Ok((index, at))
    }

    /// A device's read of `size` bytes, which `address` is a multiple of.
    #[inline(always)]
    pub(super) fn load(&mut self, address: u64, size: usize, who: Who) -> Result<u64, Cause> {
        let (index, at) = self.find(address, size)?;
        let a = &mut self.allocations[index];
        if a.written[at..at + size].contains(&0) {
            return Err(Cause::Uninitialised { address });
        }
        for word in a.words(at, size) {
            word.read(address, who)?;
        }
        Ok(gather(&a.bytes[at..at + size]))
    }

    /// A device's atomic operation on 64 bits; returns the old value.
    pub(super) fn atomic(&mut self, kind: Atom, address: u64, value: u64, launch: u32) -> Result<u64, Cause> {
        if !address.is_multiple_of(8) {
            return Err(Cause::Misaligned { address });
        }
        let (index, at) = self.find(address, 8)?;
        let a = &mut self.allocations[index];
        if a.written[at..at + 8].contains(&0) {
            return Err(Cause::Uninitialised { address });
        }
        for word in a.words(at, 8) {
            word.atomic(address, launch)?;
        }
        let before = gather(&a.bytes[at..at + 8]);
        let after = match kind {
            Atom::Min => before.min(value),
            Atom::Add => before.wrapping_add(value),
        };
        a.bytes[at..at + 8].copy_from_slice(&after.to_le_bytes());
        Ok(before)
    }

    /// A device's write of the low `size` bytes of `value`; `address` is a multiple of `size`.
    #[inline(always)]
    pub(super) fn store(&mut self, address: u64, size: usize, value: u64, who: Who) -> Result<(), Cause> {
        let (index, at) = self.find(address, size)?;
        let a = &mut self.allocations[index];
        let value = &value.to_le_bytes()[..size];
        let changes = &a.bytes[at..at + size] != value || a.written[at..at + size].contains(&0);
        for word in a.words(at, size) {
            word.write(address, who, changes)?;
        }
        a.bytes[at..at + size].copy_from_slice(value);
        a.written[at..at + size].fill(1);
        Ok(())
    }
}

/// At most 8 little-endian bytes.
#[inline(always)]
fn gather(bytes: &[u8]) -> u64 {
    match *bytes {
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]).into(),
        _ => bytes.iter().rev().fold(0, |x, &b| x << 8 | u64::from(b)),
    }
}

/// Local memory of the threads of a warp.
#[derive(Debug)]
pub struct Local {
    size: usize,
    /// A thread's bytes together.
    bytes: Vec<u8>,
    written: Vec<u8>,
}

impl Local {
    pub(super) fn new(size: usize) -> Local {
        Local { size, bytes: vec![0xa5; size * super::LANES], written: vec![0; size * super::LANES] }
    }

    pub(super) fn clear(&mut self) {
        self.written.fill(0);
    }

    /// Whether `address` is in local memory.
    #[inline(always)]
    pub(super) fn holds(address: u64) -> bool {
        address >> SHIFT == super::LOCAL >> SHIFT
    }

    #[inline(always)]
    fn find(&self, address: u64, size: usize, lane: usize) -> Result<usize, Cause> {
        let at = address as u32 as usize;
        if !Self::holds(address) || at + size > self.size {
            return Err(Cause::OutOfBounds { address });
        }
        Ok(lane * self.size + at)
    }

    #[inline(always)]
    pub(super) fn load(&self, address: u64, size: usize, lane: usize) -> Result<u64, Cause> {
        let at = self.find(address, size, lane)?;
        if self.written[at..at + size].contains(&0) {
            return Err(Cause::Uninitialised { address });
        }
        Ok(gather(&self.bytes[at..at + size]))
    }

    #[inline(always)]
    pub(super) fn store(&mut self, address: u64, size: usize, value: u64, lane: usize) -> Result<(), Cause> {
        let at = self.find(address, size, lane)?;
        self.bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        self.written[at..at + size].fill(1);
        Ok(())
    }
}
