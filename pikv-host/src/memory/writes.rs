//! Tokens written into pages and copied between them: at once in the host's memory, by a device when it is told.

use crate::base::device_slice::DeviceSlice;
use crate::base::error::Error;
use crate::base::host_slice::HostSlice;
use crate::codec::{HeadCodec, Old};
use crate::memory::arena::{Near, Page, Reservation};
use crate::memory::size_class::POISON;
#[cfg(feature = "cuda")]
use pikv_core::codec::packed::{Packed, TAGS};
use pikv_core::page::{Layout, Position, Unstorable};
use pikv_core::warp::LANES;
#[cfg(feature = "cuda")]
use pikv_kernels::args::{CopyArg, WriteArg};
use pikv_lanes::Lanes;

/// Keys and values of a call, `[rows][kv_heads][dim]`.
#[derive(Clone, Copy)]
pub(crate) enum Tokens<'a> {
    Host {
        k: HostSlice<'a>,
        v: HostSlice<'a>,
    },
    /// On the device of the cache; `limits` are what each head takes of a key and a value, and what is beyond is noted at `faults`.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    Device {
        k: DeviceSlice,
        v: DeviceSlice,
        limits: &'a [[f32; 2]],
        faults: u64,
    },
}

impl<'a> Tokens<'a> {
    /// Key and value of a row, if the host has them: they themselves, or widened into `room`.
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

/// A token to be written.
pub(crate) struct Write<'a> {
    pub lane: u32,
    pub position: u32,
    /// Which row of the call's keys and values it is.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    pub row: usize,
    /// Key and value, unless they are on the device that writes them.
    pub token: Option<(&'a [f32], &'a [f32])>,
}

impl Reservation {
    /// Writes a token; on a device once [`Reservation::flush_writes`] is called. The page must have no other handle.
    pub fn write(&mut self, layout: &Layout, page: &mut Page, token: &Write<'_>) -> Result<(), Unstorable> {
        let Write { lane, position, token: of, .. } = *token;
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            of.map_or(Ok(()), |(key, value)| layout.check(key, value))?;
            let write = WriteArg { page: page.address(), position, row: token.row as u32 };
            debug_assert_eq!(write.lane(), lane, "a kernel writes at the place in the ring");
            pending.write(write);
            only(page)[lane as usize] = position;
            return Ok(());
        }
        let Some((key, value)) = of else {
            unreachable!("tensors of a device are refused by a cache without one")
        };
        layout.write(only(page), lane, Position(position), key, value)
    }

    /// Copies a token; on a device once [`Reservation::flush_copies`] is called. The target must have no other handle.
    pub fn copy(&mut self, layout: &Layout, source: &Page, from: u32, target: &mut Page, to: u32) {
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            pending.copy(layout, CopyArg { source: source.address(), target: target.address(), from, to });
            only(target)[to as usize] = source.words()[from as usize];
            return;
        }
        layout.copy(source.words(), from, only(target), to);
    }

    /// Makes a page one that may be written: where others hold it, a copy of its first `fill` lanes takes its place, and the original is
    /// returned. One copy of its words; on a device, of each lane.
    ///
    /// # Errors
    /// No memory, or the device. The page is as before then.
    pub fn own(&mut self, layout: &Layout, page: &mut Page, fill: u32) -> Result<Option<Page>, Error> {
        if !page.is_shared() {
            return Ok(None);
        }
        let mut copy = self.take(page.shard(), layout.words(), Near::Any)?;
        if page.is_near() {
            let words = only(&mut copy);
            words.copy_from_slice(page.words());
            words[fill as usize..LANES].fill(POISON);
        } else {
            (0..fill).for_each(|lane| self.copy(layout, page, lane, &mut copy, lane));
        }
        Ok(Some(std::mem::replace(page, copy)))
    }

    /// Packs the first `fill` tokens of a page; on a device once [`Reservation::flush_copies`] is called. The target must have no other
    /// handle, and the page keep its tokens until then.
    pub fn pack(
        &mut self,
        codec: &HeadCodec,
        lanes: Lanes,
        layout: &Layout,
        page: &Page,
        fill: u32,
        packed: &mut Page,
    ) {
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            pending.pack(codec, lanes, layout, page.address(), fill, packed.address());
            let positions = &page.words()[..fill as usize];
            let tags = only(packed)[..TAGS as usize].iter_mut().enumerate();
            tags.for_each(|(i, tag)| *tag = Packed::tag(positions, i));
            return;
        }
        codec.pack(lanes, layout, page.words(), fill, only(packed));
    }

    /// Packs the `fill` tokens of a page that `codec` packed, whose last position is `last`, by its second codec; as
    /// [`Reservation::pack`].
    #[allow(clippy::too_many_arguments)]
    pub fn repack(
        &mut self,
        codec: &HeadCodec,
        lanes: Lanes,
        layout: &Layout,
        page: &Page,
        fill: u32,
        last: u32,
        packed: &mut Page,
    ) {
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            pending.repack(codec, lanes, layout, (page.address(), fill, last), packed.address());
            // The tokens are the same.
            only(packed)[..TAGS as usize].copy_from_slice(&page.words()[..TAGS as usize]);
            return;
        }
        codec.repack(lanes, layout, Old { words: page.words(), fill, last }, only(packed));
    }

    /// Forgets that a page was to be packed, which was not flushed.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn forget_pack(&mut self, packed: &Page) {
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            pending.forget_pack(packed.address());
        }
    }

    /// Forgets the copy to a lane, which was asked for last of those to its page and not flushed: the page may be given back.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn forget_copy(&mut self, target: &Page, to: u32) {
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            pending.forget_copy(target.address(), to);
        }
    }

    /// Forgets writes that were not flushed.
    pub fn forget_writes(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            pending.forget_writes();
        }
    }

    /// Has a device do the writes; their rows are those of `tokens`.
    ///
    /// # Errors
    /// No memory, or the device. Nothing was written then.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn flush_writes(&mut self, layout: &Layout, tokens: &Tokens<'_>) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            let done = pending.launch_writes(layout, tokens);
            pending.forget_writes();
            return done;
        }
        Ok(())
    }

    /// Has a device do the copies, and then pack.
    ///
    /// # Errors
    /// No memory, or the device. What was not done then is done by the next call.
    pub fn flush_copies(&mut self) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        if let Some(pending) = &mut self.pending {
            pending.launch_copies()?;
            pending.launch_packs()?;
        }
        Ok(())
    }
}

/// The words of a page that the host has, to be written.
fn only(page: &mut Page) -> &mut [u32] {
    match page.words_mut() {
        Some(words) => words,
        None => unreachable!("the page was made the sequence's own, which is borrowed mutably"),
    }
}
