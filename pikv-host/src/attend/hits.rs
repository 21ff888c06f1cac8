//! Wanted pages of rows, and which of them are hits.

use crate::attend::options::ReadPages;
use crate::attend::select::{folded, largest};
use crate::base::host_slice::HostSlice;
use crate::base::ids::{Place, run_place};
use crate::base::scratch::emptied;
use crate::codec::HeadCodec;
use crate::config::hits::Hits;
use crate::config::shape::CacheShape;
use crate::pages::entry::PageState;
use crate::pages::filing::LayerPages;
use crate::pages::ghosts::{self, Mark};
use crate::pages::run::Run;
use crate::router::met::{Met, combined};
use pikv_core::bound;
use pikv_core::page::PAGE;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::cell::Cell;
use std::ops::Range;

/// Experts of a row, first choice first.
type Experts = SmallVec<[u16; 8]>;

/// Buffers that a thread keeps between calls: a step of a size that the thread has seen allocates nothing.
#[derive(Default)]
struct HitBuffers {
    pages: Vec<&'static [[u32; LANES]]>,
    marks: Vec<Mark>,
    wide: Vec<f32>,
    queries: Vec<[f32; LANES]>,
    most: Vec<f32>,
    order: Vec<usize>,
}

thread_local! {
    static ROOM: Cell<HitBuffers> = Cell::default();
}

/// Rows of a sequence in a layer, and how hits are counted.
pub(crate) struct Asking<'a> {
    pub inner: &'a CacheShape,
    pub hits: Hits,
    pub shape: &'a LayerShape,
    /// Factor by which scaled RoPE enlarges products of rotated channels.
    pub stretch: f32,
    pub layer: &'a LayerPages,
    /// Positions of the rows.
    pub rows: Range<u32>,
    pub read: ReadPages,
    /// Experts whose pages each row reads, if they are not those of its filing.
    pub fetched: Fetched<'a>,
}

/// Experts of a row whose pages it reads, with [`ReadPages::Experts`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fetched<'a> {
    /// Number of filing experts that are read; all if `None`.
    pub first: Option<u32>,
    /// More experts of each row of the step, `[rows][width]`, and how many of them are read.
    pub more: &'a [u16],
    pub counts: &'a [u8],
}

impl Fetched<'_> {
    /// The further experts of a row of the step.
    pub fn more(&self, row: usize) -> &[u16] {
        let Some(count) = self.counts.get(row) else { return &[] };
        let width = self.more.len() / self.counts.len();
        &self.more[row * width..][..usize::from(*count)]
    }
}

impl Asking<'_> {
    /// Adds the wanted and held pages of the rows of head `h` to `met`. `q` gives the queries of a row, `[group][k_dim]`; `row` is the
    /// index of the sequence's first row in the step. Returns the bytes of wanted pages on other ranks.
    pub fn meet<'q>(
        &self,
        h: usize,
        row: usize,
        q: impl Fn(usize) -> HostSlice<'q>,
        met: &mut Vec<Met>,
    ) -> u64 {
        let Asking { inner, hits, shape, layer, .. } = self;
        let (head, codec) = (&layer.heads[h], layer.codecs[h].as_ref());
        let sharing = layer.sharing(inner, shape);
        let HitBuffers { pages, mut marks, mut wide, mut queries, mut most, mut order } = ROOM.take();
        let (mut far, mut pages) = (0, emptied(pages));
        let floor = inner.known_before(self.rows.start);
        let (dtype, rows) =
            (ghosts::dtype(&shape.layout, shape.rope.as_ref()), bound::rows(shape.layout.k_dim));
        // Marks that all rows see are listed once.
        let mut listed = false;
        for (i, position) in (0..).zip(self.rows.clone()).filter(|(_, p)| p.is_multiple_of(hits.every)) {
            let experts = self.experts(position, row + i as usize);
            if !listed || shape.window.is_some() || experts.is_some() {
                pages.clear();
                marks.clear();
                let lo = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
                let seen = |mark: &Mark| {
                    let asked = experts.as_ref().is_none_or(|(all, _)| all.contains(&mark.expert));
                    mark.last >= lo && asked
                };
                for (mark, words) in
                    head.ghosts.seen(floor, hits.known as usize).filter(|(mark, _)| seen(mark))
                {
                    marks.push(mark);
                    pages.push(words);
                }
                listed = true;
            }
            if marks.is_empty() {
                continue;
            }
            folded(shape, self.stretch, q(i as usize).wide(&mut wide), &mut queries);
            most.clear();
            most.resize(pages.len(), 0.0);
            pikv_lanes::bounds::largest_of_halves(
                inner.config.lanes,
                dtype,
                &queries,
                rows,
                &pages,
                &mut most,
            );
            let from = met.len();
            largest(&most, hits.pages as usize, &mut order);
            for &at in &order {
                let Mark { expert, first, last } = marks[at];
                let read = experts.as_ref().is_none_or(|(_, read)| read.contains(&expert));
                let mut held = 0;
                for c in sharing.runs_of(expert, first, last).into_iter().map(|run| 1 + usize::from(run)) {
                    let (tokens, away) = head.runs[c].held(codec, (c, expert), first..last + 1);
                    held += tokens;
                    far += away;
                }
                met.push(Met { row: i, expert, wanted: 1, held: if read { held } else { 0 } });
            }
            combined(met, from, |met| met);
        }
        ROOM.set(HitBuffers { pages: emptied(pages), marks, wide, queries, most, order });
        far
    }

    /// Experts whose pages the row at `position` can want, and those whose pages it reads; `None` unless rows read the pages of their
    /// experts.
    fn experts(&self, position: u32, row: usize) -> Option<(Experts, Experts)> {
        if self.read != ReadPages::Experts {
            return None;
        }
        let own: SmallVec<[u16; 8]> = self.layer.experts(self.inner, position).collect();
        let first = self.fetched.first.map_or(own.len(), |n| own.len().min(n as usize));
        let more = self.fetched.more(row).iter().copied();
        let read = own[..first].iter().copied().chain(more.clone()).collect();
        Some((own.into_iter().chain(more).collect(), read))
    }
}

impl Run {
    /// Number of live tokens of home expert `expert` at `positions` in the first tier, and bytes of pages on other ranks that have some;
    /// this is the run with index `c`. `O(log pages)`, plus the tokens of the pages.
    fn held(
        &self,
        codec: Option<&HeadCodec>,
        (c, expert): (usize, u16),
        positions: Range<u32>,
    ) -> (u32, u64) {
        let Place::Run(run) = run_place(c) else { return (0, 0) };
        let (mut held, mut far) = (0, 0);
        for entry in self.entries.range(self.first_with(positions.start)..) {
            if entry.live == 0 {
                continue;
            }
            let oldest = entry.live.trailing_zeros();
            if entry.position(codec, oldest).is_none_or(|position| position >= positions.end) {
                break;
            }
            let live = entry.live & entry.homes.among(run, &[expert]);
            if live == 0 {
                continue;
            }
            let first = live.trailing_zeros();
            let inside = |lane: u32| entry.position(codec, lane).is_some_and(|p| positions.contains(&p));
            let last = LANES as u32 - 1 - live.leading_zeros();
            let tokens = match inside(first) && inside(last) {
                // Positions ascend.
                true => live.count_ones(),
                false => (0..PAGE).filter(|lane| live >> lane & 1 == 1 && inside(*lane)).count() as u32,
            };
            match &entry.held {
                PageState::Away(away) => match away.slot.rank_page() {
                    Some(kept) if kept.is_here() => held += tokens,
                    Some(_) if tokens > 0 => far += away.slot.bytes(),
                    _ => {}
                },
                _ => held += tokens,
            }
        }
        (held, far)
    }

    /// Index of the first page whose last token is at `position` or later; evicted pages have no last token.
    fn first_with(&self, position: u32) -> usize {
        let (mut from, mut to) = (0, self.entries.len());
        while from < to {
            let middle = (from + to) / 2;
            let known = self.entries.range(from..=middle).rev().position(|entry| entry.last().is_some());
            let before = |back: usize| self.entries[middle - back].last().is_some_and(|last| last < position);
            match known {
                Some(back) if !before(back) => to = middle - back,
                _ => from = middle + 1,
            }
        }
        from
    }
}
