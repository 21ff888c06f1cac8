//! Writes and copies of tokens in pages: at once in host memory, deferred to a launch on a device.

use crate::base::device_slice::DeviceSlice;
use crate::base::error::Error;
use crate::base::host_slice::HostSlice;
use crate::codec::{HeadCodec, Old};
use crate::memory::arena::{Near, Page, Reservation};
use crate::memory::size_class::FILLER;
use pikv_core::codec::packed::{Packed, TAGS};
use pikv_core::page::{Layout, PAGE, Position, Unstorable};
use pikv_core::warp::LANES;
use pikv_lanes::Lanes;

/// Keys and values of a call, `[rows][kv_heads][dim]`.
#[derive(Clone, Copy)]
pub(crate) enum Tokens<'a> {
    Host {
        k: HostSlice<'a>,
        v: HostSlice<'a>,
    },
    /// On the cache's device; `limits` are the largest key and value of each head, and values beyond them are recorded at `faults`.
    Device {
        k: DeviceSlice,
        v: DeviceSlice,
        limits: &'a [[f32; 2]],
        faults: u64,
    },
}

impl<'a> Tokens<'a> {
    /// Key and value of a row as f32, if they are on the host: slices of the tensors, or copies in `room`.
    pub fn row<'r>(
        &self,
        layout: &Layout,
        row: usize,
        room: &'r mut [Vec<f32>; 2],
    ) -> Option<(&'r [f32], &'r [f32])>
    where
        'a: 'r,
    {
        let (k_dim, v_dim) = (layout.k_dim as usize, layout.v_dim as usize);
        let [k_room, v_room] = room;
        match *self {
            Tokens::Host { k, v } => {
                Some((k.part(row * k_dim, k_dim).wide(k_room), v.part(row * v_dim, v_dim).wide(v_room)))
            }
            Tokens::Device { .. } => None,
        }
    }
}

/// A token to write.
pub(crate) struct Write<'a> {
    pub lane: u32,
    pub position: u32,
    /// Row of the call's keys and values.
    pub row: usize,
    /// Key and value, unless they are on the device.
    pub token: Option<(&'a [f32], &'a [f32])>,
}

impl Reservation {
    /// Writes a token; on a device at [`Reservation::flush_writes`]. The page must have no other handle.
    pub fn write(&mut self, layout: &Layout, page: &mut Page, token: &Write<'_>) -> Result<(), Unstorable> {
        let Write { lane, position, token: of, .. } = *token;
        if let Some(pending) = &mut self.pending {
            of.map_or(Ok(()), |(key, value)| layout.check(key, value))?;
            debug_assert_eq!(position % PAGE, lane, "a kernel writes at the place in the ring");
            pending.write(page.address(), position, token.row as u32);
            only(page)[lane as usize] = position;
            return Ok(());
        }
        let Some((key, value)) = of else {
            unreachable!("tensors of a device are refused by a cache without one")
        };
        layout.write(only(page), lane, Position(position), key, value)
    }

    /// Copies a token; on a device at [`Reservation::flush_writes`] or [`Reservation::flush_copies`]. The target must have no other handle.
    pub fn copy(&mut self, layout: &Layout, source: &Page, from: u32, target: &mut Page, to: u32) {
        if let Some(pending) = &mut self.pending {
            pending.copy(layout, (source.address(), from), (target.address(), to));
            only(target)[to as usize] = source.words()[from as usize];
            return;
        }
        layout.copy(source.words(), from, only(target), to);
    }

    /// Makes a page writable: a shared page is replaced by a copy of its first `fill` lanes, and returned. Copies all words at once; on a
    /// device, each lane.
    ///
    /// # Errors
    /// No memory, or a failed device. The page is then unchanged.
    pub fn own(&mut self, layout: &Layout, page: &mut Page, fill: u32) -> Result<Option<Page>, Error> {
        if !page.is_shared() {
            return Ok(None);
        }
        let mut copy = self.take(page.shard(), layout.words(), Near::Any)?;
        if page.is_near() {
            let words = only(&mut copy);
            words.copy_from_slice(page.words());
            words[fill as usize..LANES].fill(FILLER);
        } else {
            (0..fill).for_each(|lane| self.copy(layout, page, lane, &mut copy, lane));
        }
        Ok(Some(std::mem::replace(page, copy)))
    }

    /// Packs the first `fill` tokens of a page; on a device at [`Reservation::flush_copies`]. The target must have no other
    /// handle, and the page must keep its tokens until then.
    pub fn pack(
        &mut self,
        codec: &HeadCodec,
        lanes: Lanes,
        layout: &Layout,
        page: &Page,
        fill: u32,
        packed: &mut Page,
    ) {
        if let Some(pending) = &mut self.pending {
            pending.pack(codec, lanes, layout, page.address(), fill, packed.address());
            let positions = &page.words()[..fill as usize];
            let tags = only(packed)[..TAGS as usize].iter_mut().enumerate();
            tags.for_each(|(i, tag)| *tag = Packed::tag(positions, i));
            return;
        }
        codec.pack(lanes, layout, page.words(), fill, only(packed));
    }

    /// Packs the tokens of a page that `codec` packed by the second codec; deferred like [`Reservation::pack`]. The page is given with the
    /// number of its tokens and the position of its last.
    pub fn repack(
        &mut self,
        codec: &HeadCodec,
        lanes: Lanes,
        layout: &Layout,
        (page, fill, last): (&Page, u32, u32),
        packed: &mut Page,
    ) {
        if let Some(pending) = &mut self.pending {
            pending.repack(codec, lanes, layout, (page.address(), fill, last), packed.address());
            // The tokens are the same.
            only(packed)[..TAGS as usize].copy_from_slice(&page.words()[..TAGS as usize]);
            return;
        }
        codec.repack(lanes, layout, Old { words: page.words(), fill, last }, only(packed));
    }

    /// Drops a deferred pack to a page.
    pub fn forget_pack(&mut self, packed: &Page) {
        if let Some(pending) = &mut self.pending {
            pending.forget_pack(packed.address());
        }
    }

    /// Drops the deferred copy to a lane, the last one to its page, so that the page can be freed.
    pub fn forget_copy(&mut self, target: &Page, to: u32) {
        if let Some(pending) = &mut self.pending {
            pending.forget_copy(target.address(), to);
        }
    }

    /// Drops deferred writes.
    pub fn forget_writes(&mut self) {
        if let Some(pending) = &mut self.pending {
            pending.forget_writes();
        }
    }

    /// Launches the deferred writes of rows of `tokens`, and those deferred copies that need no launch after another. No copy may read a token
    /// that is written here.
    ///
    /// # Errors
    /// No memory, or a failed device. Nothing was written or copied then.
    pub fn flush_writes(&mut self, layout: &Layout, tokens: &Tokens<'_>) -> Result<(), Error> {
        if let Some(pending) = &mut self.pending {
            let done = pending.launch_writes(layout, tokens);
            pending.forget_writes();
            return done;
        }
        Ok(())
    }

    /// Launches the deferred copies, then the packs.
    ///
    /// # Errors
    /// No memory, or a failed device. The next call launches the rest.
    pub fn flush_copies(&mut self) -> Result<(), Error> {
        if let Some(pending) = &mut self.pending {
            pending.launch_copies()?;
            pending.launch_packs()?;
        }
        Ok(())
    }
}

/// The words of a page in host memory, for writing.
fn only(page: &mut Page) -> &mut [u32] {
    match page.words_mut() {
        Some(words) => words,
        None => unreachable!("the page was made the sequence's own, which is borrowed mutably"),
    }
}
