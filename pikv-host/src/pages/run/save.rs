//! Saves and restores a run of pages.

use super::Run;
use crate::base::error::{Error, SaveError};
use crate::base::fields::{Fields, content, put_floats, sure};
use crate::base::ids::run_place;
use crate::codec::HeadCodec;
use crate::config::shape::CacheShape;
use crate::memory::arena::{Near, Page};
use crate::pages::entry::{Away, Closed, Entry, PageState};
use crate::pages::homes::Homes;
use crate::pages::saved::{In, Out, Place, Words, within};
use pikv_core::attend::filled;
use pikv_core::bound;
use pikv_core::page::{Layout, PAGE};
use pikv_core::warp::LANES;

/// Storage of a page, in the low bits of its word.
const GONE: u32 = 0;
const OPEN: u32 = 1;
const CLOSED: u32 = 2;
const AWAY: u32 = 3;
/// Flags of a packed page: the original follows; the second codec's form follows after that; the page is by the second codec.
const ORIGINAL: u32 = 1 << 8;
const NEXT: u32 = 1 << 9;
const OLD: u32 = 1 << 10;
/// Flag of a page in a lower tier: it is packed. The upper byte is the tier.
const PACKED: u32 = 1 << 11;
const TIER: u32 = 24;
/// Flags of an entry, beside the number of its tokens. Whether it is tied is not read, but follows from the changes that a rollback undoes.
const TIED: u32 = 1 << 8;
const BOUNDED: u32 = 1 << 9;
const HOMES: u32 = 1 << 10;
/// Limit of the number of evicted lanes.
const MOST_DEAD: u32 = 1 << 28;

/// A run of pages.
#[derive(Clone, Copy)]
pub(crate) struct RunOf<'a> {
    pub shape: &'a CacheShape,
    pub layout: &'a Layout,
    /// The head's codec, if the run has one.
    pub codec: Option<&'a HeadCodec>,
    /// Index of the KV head over all layers.
    pub head: u32,
    pub run: usize,
    /// Tokens that left the ring: all positions are below.
    pub filed: u32,
}

impl RunOf<'_> {
    fn shard(&self, ordinal: u32) -> u32 {
        self.shape.shard_of(run_place(self.run), ordinal, self.head)
    }

    /// Reads the home experts of a page.
    ///
    /// # Errors
    /// [`content`] in the run of the sinks, and for an expert that is not there.
    pub fn load_homes(&self, from: &mut Fields<'_>) -> Result<Homes, Error> {
        sure(self.run > 0, "experts of the sinks")?;
        Homes::load(from, self.shape.config.experts)
    }

    /// Positions of the tokens of a page, all of which must have left the ring; for a packed page by its codec and last position. Lanes
    /// without a live token may be free, except the last.
    pub fn positions(
        &self,
        words: &[u32],
        Lanes { fill, read, .. }: Lanes,
        packed: Option<(&HeadCodec, u32)>,
    ) -> Result<[u32; LANES], Error> {
        let mut positions = [u32::MAX; LANES];
        for (lane, to) in (0..fill).zip(&mut positions) {
            let position = match packed {
                // A position below 0 shows as one below `round`, which is added.
                Some((codec, last)) => {
                    let round = 1 << 16;
                    codec.packed.position(words, lane, last + round).0.checked_sub(round)
                }
                None => Some(words[lane as usize]),
            };
            let is_free = read >> lane & 1 == 0 && lane + 1 < fill && position == Some(u32::MAX);
            if is_free {
                continue;
            }
            let there = position.filter(|position| *position < self.filed);
            *to = there
                .ok_or_else(|| content("a token in a page at a position that did not leave the ring"))?;
        }
        Ok(positions)
    }
}

/// Lanes of the page at `ordinal`: the first `fill` were written; `read` has those with tokens that are read, or would be after a rollback.
#[derive(Clone, Copy)]
pub(crate) struct Lanes {
    pub ordinal: u32,
    pub fill: u32,
    pub read: u32,
}

impl PageState {
    /// Adds the storage of a page with `fill` tokens.
    pub fn save<'a>(&'a self, layout: &'a Layout, fill: u32, last: Option<u32>, to: &mut Out<'a>) {
        match self {
            PageState::Gone { last } => to.fields.extend([GONE, *last]),
            PageState::Open(page) => {
                to.fields.push(OPEN);
                to.pages.push(Words::plain(page, layout, fill));
            }
            PageState::Closed(Closed { packed, original, last, by, old, next }) => {
                let flag = |on: bool, flag| if on { flag } else { 0 };
                let flags = flag(original.is_some(), ORIGINAL) | flag(next.is_some(), NEXT) | flag(*old, OLD);
                to.fields.extend([CLOSED | flags, *last, *by]);
                to.pages.push(Words::Page(packed));
                to.pages.extend(original.iter().map(|page| Words::plain(page, layout, fill)));
                to.pages.extend(next.iter().map(Words::Page));
            }
            PageState::Away(Away { slot, by }) => {
                let tier = (slot.level.index as u32).min(u32::MAX >> TIER) << TIER;
                match by {
                    Some(by) => to.fields.extend([AWAY | PACKED | tier, last.unwrap_or(0), *by]),
                    None => to.fields.push(AWAY | tier),
                }
                to.pages.push(Words::Away(slot));
            }
        }
    }

    /// Reads the data of [`PageState::save`], for a page near `near`; `None` if it lies behind the tokens to restore.
    ///
    /// # Errors
    /// [`content`] for invalid data; those of the source, and of the page memory.
    pub fn load(
        from: &mut Fields<'_>,
        input: &mut In<'_>,
        of: &RunOf<'_>,
        lanes: Lanes,
        near: Near<'_>,
    ) -> Result<Option<PageState>, Error> {
        let word = from.word()?;
        let (plain, shard) = (of.layout.words(), of.shard(lanes.ordinal));
        match word & 0xff {
            GONE => Ok(Some(PageState::Gone { last: from.word()? })),
            OPEN => {
                let page = input.wanted(shard, plain, near)?;
                of.positions(page.as_ref().map_or(&input.buffer, |page| page.positions()), lanes, None)?;
                Ok(page.map(PageState::Open))
            }
            CLOSED => {
                let codec = of.codec.ok_or_else(|| content("a packed page of a head that packs none"))?;
                let [last, by] = [from.word()?, from.word()?];
                sure(last < of.filed && (last..of.filed).contains(&by), "a page packed by a token to come")?;
                let has = |flag| word & flag != 0;
                let (old, aged) = (has(OLD), codec.aged.as_ref().map(|aged| &aged.codec));
                sure(!has(OLD | NEXT) || aged.is_some(), "a page packed twice by one codec")?;
                sure(!(old && has(NEXT | ORIGINAL)), "a page packed thrice")?;
                let newest = aged.filter(|_| old).unwrap_or(codec);
                let packed = input.page(shard, newest.packed.words(), near)?;
                of.positions(packed.words(), lanes, Some((newest, last)))?;
                let original = has(ORIGINAL).then(|| input.page(shard, plain, Near::Any)).transpose()?;
                if let Some(page) = &original {
                    of.positions(page.positions(), lanes, None)?;
                }
                let next = match aged.filter(|_| has(NEXT)) {
                    None => None,
                    Some(aged) => {
                        let page = input.page(shard, aged.packed.words(), Near::Any)?;
                        of.positions(page.words(), lanes, Some((aged, last)))?;
                        Some(page)
                    }
                };
                Ok(Some(PageState::Closed(Closed { packed, original, last, by, old, next })))
            }
            AWAY => PageState::load_away(from, input, of, word, lanes, near),
            _ => Err(content("a page held as nothing that is known")),
        }
    }

    /// Reads a page of a lower tier into a lower tier with room, or else into the first tier.
    fn load_away(
        from: &mut Fields<'_>,
        input: &mut In<'_>,
        of: &RunOf<'_>,
        word: u32,
        lanes: Lanes,
        near: Near<'_>,
    ) -> Result<Option<PageState>, Error> {
        let (tier, shard) = ((word >> TIER) as usize, of.shard(lanes.ordinal));
        if word & PACKED == 0 {
            let positions = |words: &[u32]| of.positions(words, lanes, None);
            return Ok(match input.away(tier, of.layout.words(), positions)? {
                Place::Lower(slot) => Some(PageState::Away(Away { slot, by: None })),
                Place::First => Some(PageState::Open(input.raised(shard, near)?)),
                Place::Behind => None,
            });
        }
        let codec = of.codec.ok_or_else(|| content("a packed page of a head that packs none"))?;
        let [last, by] = [from.word()?, from.word()?];
        sure(last < of.filed && (last..of.filed).contains(&by), "a page packed by a token to come")?;
        let positions = |words: &[u32]| of.positions(words, lanes, Some((codec, last)));
        Ok(match input.away(tier, codec.packed.words(), positions)? {
            Place::Lower(slot) => Some(PageState::Away(Away { slot, by: Some(by) })),
            Place::First => {
                let packed = input.raised(shard, near)?;
                Some(PageState::Closed(Closed { packed, original: None, last, by, old: false, next: None }))
            }
            Place::Behind => None,
        })
    }
}

/// Adds the bounds of a page, if they are kept.
pub(crate) fn save_bounds(bounds: Option<&[[f32; LANES]]>, to: &mut Vec<u32>) {
    put_floats(to, bounds.unwrap_or_default().as_flattened());
}

/// Reads the data of [`save_bounds`].
///
/// # Errors
/// The data end early.
pub(crate) fn load_bounds(from: &mut Fields<'_>, layout: &Layout) -> Result<Box<[[f32; LANES]]>, Error> {
    let rows = 2 * bound::rows(layout.k_dim);
    let words = from.slice(rows * LANES)?;
    let floats: Vec<[f32; LANES]> =
        words.as_chunks().0.iter().map(|row: &[u32; LANES]| row.map(f32::from_bits)).collect();
    Ok(floats.into_boxed_slice())
}

impl Entry {
    /// Adds the entry; `tied`: whether it must stay in the first tier.
    pub fn save<'a>(&'a self, layout: &'a Layout, tied: bool, to: &mut Out<'a>) {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let flags =
            flag(tied, TIED) | flag(self.bounds.is_some(), BOUNDED) | flag(self.homes.is_listed(), HOMES);
        to.fields.extend([self.ordinal, self.fill | flags, self.live, self.pending]);
        self.held.save(layout, self.fill, self.last(), to);
        save_bounds(self.bounds.as_deref(), &mut to.fields);
        self.homes.save(&mut to.fields);
    }

    /// Reads the data of [`Entry::save`]; `None` if the page lies behind the tokens to restore.
    ///
    /// # Errors
    /// Errors of [`PageState::load`].
    pub fn load(
        from: &mut Fields<'_>,
        input: &mut In<'_>,
        of: &RunOf<'_>,
        near: Near<'_>,
    ) -> Result<Option<Entry>, Error> {
        let [ordinal, word, live, pending] = [from.word()?, from.word()?, from.word()?, from.word()?];
        let fill = word & 0xff;
        let sound = (1..=PAGE).contains(&fill) && within(live | pending, fill) && live & pending == 0;
        sure(sound, "a page of tokens that were not written")?;
        let held = PageState::load(from, input, of, Lanes { ordinal, fill, read: live | pending }, near)?;
        let is_gone = matches!(held, Some(PageState::Gone { .. }));
        sure(!is_gone || live | pending == 0, "tokens of a page that is gone")?;
        if input.until.is_some() && (is_gone || live != filled(fill)) {
            return Err(SaveError::evicted());
        }
        let bounds = (word & BOUNDED != 0).then(|| load_bounds(from, of.layout)).transpose()?;
        let homes = if word & HOMES != 0 { of.load_homes(from)? } else { Homes::default() };
        let Some(held) = held else {
            input.behind += fill;
            return Ok(None);
        };
        Ok(Some(Entry { ordinal, held, fill, live, pending, bounds, homes }))
    }
}

impl Run {
    /// Whether no token was ever filed in the run, so that it is not saved.
    pub fn is_fresh(&self) -> bool {
        self.next == 0 && self.filed == 0 && self.entries.is_empty()
    }

    /// Adds the run, without evicted pages whose tokens all lie before `kept`, which no rollback reaches.
    pub fn save<'a>(&'a self, layout: &'a Layout, kept: u32, to: &mut Out<'a>) {
        let is_left = |entry: &Entry| !matches!(entry.held, PageState::Gone { last } if last < kept);
        let left = self.entries.iter().filter(|entry| is_left(entry));
        to.fields.extend([self.next, self.aged, self.dead, self.filed, left.clone().count() as u32]);
        left.for_each(|entry| entry.save(layout, self.is_tied(entry.ordinal), to));
        self.kept.save(&mut to.fields, |i| is_left(&self.entries[i]));
    }

    /// Reads the data of [`Run::save`] into a run without pages; `gone` is the largest number of evicted pages in the
    /// data.
    ///
    /// # Errors
    /// Errors of [`PageState::load`].
    pub fn load(
        &mut self,
        from: &mut Fields<'_>,
        input: &mut In<'_>,
        of: &RunOf<'_>,
        mut gone: u32,
    ) -> Result<(), Error> {
        let [next, aged, dead, filed] = [from.word()?, from.word()?, from.word()?, from.word()?];
        sure(next <= u32::MAX / 2 && aged <= next && dead <= MOST_DEAD, "counts of pages that no run has")?;
        let (mut least, mut fills) = (0, 0);
        let mut newest: Option<u32> = None;
        let pages = from.count(5)?;
        let mut last: Option<Page> = None;
        for _ in 0..pages {
            let Some(entry) = Entry::load(from, input, of, Near::next(last.as_ref()))? else { continue };
            sure((least..next).contains(&entry.ordinal), "pages out of order")?;
            least = entry.ordinal + 1;
            fills += entry.fill;
            self.live += entry.live.count_ones();
            for lane in (0..PAGE).filter(|lane| entry.live >> lane & 1 == 1) {
                let position = entry.position(of.codec, lane);
                sure(position > newest, "tokens of a run out of order")?;
                newest = position;
            }
            if entry.is_gone() {
                gone = gone
                    .checked_sub(1)
                    .ok_or_else(|| content("more evicted pages than a rollback reaches"))?;
            }
            last = entry.page().cloned();
            self.entries.push_back(entry);
        }
        if input.until.is_some() && pages != next as usize {
            return Err(SaveError::evicted());
        }
        sure((fills..=of.filed).contains(&filed), "more tokens in pages than were filed")?;
        // Of a sequence restored at an earlier length the newest pages are not read.
        let whole = input.until.is_none() && self.room().is_some();
        sure(!whole || least == next, "a page with room that is not the newest")?;
        (self.next, self.aged, self.dead, self.filed) = (next, aged, dead, filed);
        self.kept.load(from, pages)
    }
}
