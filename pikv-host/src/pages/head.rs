//! A KV head of a layer: its ring, its runs of pages, and the filing of tokens from one to the other.

use crate::base::error::Error;
use crate::base::ids::run_place;
use crate::codec::HeadCodec;
use crate::config::shape::CacheShape;
use crate::memory::arena::{Near, Page, Reservation};
use crate::pages::entry::{Entry, PageState};
use crate::pages::ghosts::Ghosts;
use crate::pages::run::Run;
use crate::pages::runs::Runs;
use crate::pages::sealed::Sealed;
use crate::pages::tiles::Tiles;
use pikv_core::codec::packed::Packed;
use pikv_core::page::{Layout, PAGE, Position, Slot};
use pikv_core::plan::LayerShape;

/// One KV head of one layer.
#[derive(Clone, Debug)]
pub(crate) struct HeadPages {
    /// The ring, from the layer's `first_tile`.
    pub ring: Tiles,
    /// The sinks, then each expert.
    pub runs: Runs,
    /// The policy's state of the head, a version for each length that a rollback can return to.
    pub own: Vec<f32>,
    /// Bounds of the pages that a row can want.
    pub ghosts: Ghosts,
}

/// A token that leaves the ring.
pub(crate) struct Filed<'a> {
    pub inner: &'a CacheShape,
    pub shape: &'a LayerShape,
    pub run: usize,
    /// Home expert; `None` for a sink.
    pub home: Option<u16>,
    pub position: u32,
    /// Index of the KV head over all layers.
    pub head: u32,
    pub first_tile: u32,
    /// Pages filed ahead, and the head's index in its layer.
    pub ahead: Option<(&'a Sealed, usize)>,
    /// Whether ring and run may share one page.
    pub aliased: bool,
}

impl Filed<'_> {
    /// The page that already has the token at this ordinal and lane of its run; `ring` is the token's page in the ring.
    fn page(&self, run: &Run, (ordinal, lane): (u32, u32), ring: &Page) -> Option<Page> {
        let Filed { inner, run: c, position, head, .. } = *self;
        let ahead = self.ahead.and_then(|(sealed, h)| sealed.page(h, c, ordinal, lane, position));
        let same = || {
            let shard = inner.shard_of(run_place(c), ordinal, head);
            let open = run.room().filter(|_| lane > 0);
            let first = open.map_or(position, |(page, _)| page.positions()[0]);
            let is = position % PAGE == lane && first == position - lane && ring.positions()[0] == first;
            self.aliased && is && ring.shard() == shard
        };
        ahead.cloned().or_else(|| same().then(|| ring.clone()))
    }

    /// The page at `ordinal` of the token's run, already packed by this token.
    fn packed(&self, ordinal: u32) -> Option<Page> {
        let (sealed, h) = self.ahead?;
        sealed.packed(h, self.run, ordinal, self.position).cloned()
    }
}

impl HeadPages {
    /// Prefetches what [`HeadPages::file`] reads and writes in host memory for the token at `lane` of the ring's page `tile`.
    pub fn fetch(&self, layout: &Layout, run: usize, (tile, lane): (usize, u32)) {
        if let Some(page) = self.ring.get(tile) {
            page.fetch_token(layout, lane);
        }
        if let Some((page, fill)) = self.runs[run].room() {
            page.fetch_token(layout, fill);
        }
    }

    /// Copies a token to the end of its run, and packs the page if it is then full. A shared page is copied first, and `shared`
    /// gets the original.
    ///
    /// # Errors
    /// No memory, or a failed device. Nothing is counted then.
    pub fn file(
        &mut self,
        token: &Filed<'_>,
        codec: Option<&HeadCodec>,
        pages: &mut Reservation,
        shared: &mut Option<Page>,
    ) -> Result<(), Error> {
        let Filed { inner, shape, run: c, position, head, first_tile, .. } = *token;
        let layout = &shape.layout;
        let Slot { tile, lane } = Position(position).into();
        let (run, lanes) = (&mut self.runs[c], inner.config.lanes);
        let open = run.room().map(|(page, fill)| (page.words()[0], fill, page.shard()));
        let wide = open.filter(|(first, ..)| codec.is_some() && !Packed::spans(*first, position));
        let from = (tile - first_tile) as usize;
        let (ordinal, to) = run.next_place(wide.is_some());
        let fresh = to == 0;
        let ahead = token.page(run, (ordinal, to), &self.ring[from]);
        // Everything that can fail comes before the counts change.
        let mut take = |codec: &HeadCodec, shard| {
            // A sealed prefix may have the page packed already.
            if let Some(packed) = token.packed(run.next - 1) {
                return Ok(packed);
            }
            let last = run.entries.iter().rev().find_map(|entry| match &entry.held {
                PageState::Closed(closed) => Some(&closed.packed),
                _ => None,
            });
            pages.take(shard, codec.packed.words(), Near::next(last))
        };
        let (before, after) = match (codec, open) {
            (Some(codec), Some((_, _, shard))) if wide.is_some() => {
                (Some((codec, take(codec, shard)?)), None)
            }
            (Some(codec), Some((_, fill, shard))) if fill == PAGE - 1 => {
                (None, Some((codec, take(codec, shard)?)))
            }
            _ => (None, None),
        };
        if fresh {
            let shard = inner.shard_of(run_place(c), ordinal, head);
            let last = run.entries.back().and_then(Entry::page);
            // With a codec this page lives until it is packed, so it may lie anywhere.
            let near = if codec.is_some() { Near::Any } else { Near::next(last) };
            let page = match &ahead {
                Some(page) => page.clone(),
                None => pages.take(shard, layout.words(), near)?,
            };
            if let Some((codec, packed)) = before {
                run.close(codec, lanes, layout, position, packed, pages);
            }
            run.push(page);
        }
        let Some(Entry { held: PageState::Open(page), fill, .. }) = run.entries.back_mut() else {
            unreachable!("there is room, or a page was just pushed")
        };
        match ahead {
            // The page also has the tokens before this one.
            Some(ahead) if page.is(&ahead) => {}
            Some(ahead) => *shared = Some(std::mem::replace(page, ahead)),
            None => {
                *shared = pages.own(layout, page, *fill)?;
                pages.copy(layout, &self.ring[from], lane, page, *fill);
            }
        }
        let to = *fill;
        let to = (run.entries.len() - 1, to);
        run.kept.copy(0..run.kept.versions(), self.ring.states(), (from, lane), to);
        run.wrote(c, token.home);
        if c > 0
            && inner.config.key_bounds
            && let Some(entry) = run.entries.back_mut().filter(|entry| entry.fill == PAGE)
        {
            entry.bound(layout, shape.rope.as_ref());
        }
        if let Some((codec, packed)) = after {
            run.close(codec, lanes, layout, position, packed, pages);
        }
        Ok(())
    }
}
