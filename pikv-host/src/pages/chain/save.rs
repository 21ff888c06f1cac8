//! A run of pages, as it is saved.

use super::{Away, Chain, Closed, Entry, Held};
use crate::base::error::{Error, SaveError};
use crate::base::fields::{Fields, content, put_floats, sure};
use crate::base::ids::chain_place;
use crate::codec::HeadCodec;
use crate::config::shape::CacheShape;
use crate::memory::arena::{Near, Page};
use crate::pages::saved::{In, Out, Place, Words, within};
use pikv_core::attend::filled;
use pikv_core::bound;
use pikv_core::page::{Layout, PAGE};
use pikv_core::warp::LANES;

/// What a page is held as, in the low bits of its word.
const GONE: u32 = 0;
const OPEN: u32 = 1;
const CLOSED: u32 = 2;
const AWAY: u32 = 3;
/// Of a packed page: its original comes after it; what the second codec left of it comes after that; it is what that left.
const ORIGINAL: u32 = 1 << 8;
const NEXT: u32 = 1 << 9;
const OLD: u32 = 1 << 10;
/// Of a page in a lower tier: it is packed. The tier is in the upper byte.
const PACKED: u32 = 1 << 11;
const TIER: u32 = 24;
/// Of a page of a run, beside its tokens.
const TIED: u32 = 1 << 8;
const BOUNDED: u32 = 1 << 9;
/// Lanes that were evicted for good are counted up to here.
const MOST_DEAD: u32 = 1 << 28;

/// Which run pages are of.
#[derive(Clone, Copy)]
pub(crate) struct RunOf<'a> {
    pub shape: &'a CacheShape,
    pub layout: &'a Layout,
    /// The head's codec, if the run has one.
    pub codec: Option<&'a HeadCodec>,
    /// Of the KV head, counted on over the layers.
    pub head: u32,
    pub chain: usize,
    /// Tokens that left the ring: all positions lie below.
    pub filed: u32,
}

impl RunOf<'_> {
    fn shard(&self, ordinal: u32) -> u32 {
        self.shape.shard_of(chain_place(self.chain), ordinal, self.head)
    }

    /// The positions of the tokens of a page, which must be there; of a packed one by its codec and last position. Lanes whose tokens are not
    /// read can be free, but for the last.
    pub fn positions(
        &self,
        words: &[u32],
        Lanes { fill, read, .. }: Lanes,
        packed: Option<(&HeadCodec, u32)>,
    ) -> Result<[u32; LANES], Error> {
        let mut positions = [u32::MAX; LANES];
        for (lane, to) in (0..fill).zip(&mut positions) {
            let position = match packed {
                // A position that would be below 0 shows as one below the round that is added.
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

/// The lanes of a page at `ordinal`: the first `fill` were written, and those in `read` have tokens that are read, or would be after a rollback.
#[derive(Clone, Copy)]
pub(crate) struct Lanes {
    pub ordinal: u32,
    pub fill: u32,
    pub read: u32,
}

impl Held {
    /// Adds what is held of a page with `fill` tokens.
    pub fn save<'a>(&'a self, layout: &'a Layout, fill: u32, last: Option<u32>, to: &mut Out<'a>) {
        match self {
            Held::Gone { last } => to.fields.extend([GONE, *last]),
            Held::Open(page) => {
                to.fields.push(OPEN);
                to.pages.push(Words::plain(page, layout, fill));
            }
            Held::Closed(Closed { packed, original, last, by, old, next }) => {
                let flag = |on: bool, flag| if on { flag } else { 0 };
                let flags = flag(original.is_some(), ORIGINAL) | flag(next.is_some(), NEXT) | flag(*old, OLD);
                to.fields.extend([CLOSED | flags, *last, *by]);
                to.pages.push(Words::Page(packed));
                to.pages.extend(original.iter().map(|page| Words::plain(page, layout, fill)));
                to.pages.extend(next.iter().map(Words::Page));
            }
            Held::Away(Away { slot, by }) => {
                let tier = (slot.level.index as u32).min(u32::MAX >> TIER) << TIER;
                match by {
                    Some(by) => to.fields.extend([AWAY | PACKED | tier, last.unwrap_or(0), *by]),
                    None => to.fields.push(AWAY | tier),
                }
                to.pages.push(Words::Away(slot));
            }
        }
    }

    /// Reads what [`Held::save`] added, of a page that is to lie near `near`; `None` if it lies behind what is wanted.
    ///
    /// # Errors
    /// What is there is something else; those of the source, and of the page memory.
    pub fn load(
        from: &mut Fields<'_>,
        input: &mut In<'_>,
        of: &RunOf<'_>,
        lanes: Lanes,
        near: Near<'_>,
    ) -> Result<Option<Held>, Error> {
        let word = from.word()?;
        let (plain, shard) = (of.layout.words(), of.shard(lanes.ordinal));
        match word & 0xff {
            GONE => Ok(Some(Held::Gone { last: from.word()? })),
            OPEN => {
                let page = input.wanted(shard, plain, near)?;
                of.positions(page.as_ref().map_or(&input.buffer, |page| page.positions()), lanes, None)?;
                Ok(page.map(Held::Open))
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
                Ok(Some(Held::Closed(Closed { packed, original, last, by, old, next })))
            }
            AWAY => Held::load_away(from, input, of, word, lanes, near),
            _ => Err(content("a page held as nothing that is known")),
        }
    }

    /// A page that lay in a lower tier: it goes there again where there is room, and else to the first tier.
    fn load_away(
        from: &mut Fields<'_>,
        input: &mut In<'_>,
        of: &RunOf<'_>,
        word: u32,
        lanes: Lanes,
        near: Near<'_>,
    ) -> Result<Option<Held>, Error> {
        let (tier, shard) = ((word >> TIER) as usize, of.shard(lanes.ordinal));
        if word & PACKED == 0 {
            let positions = |words: &[u32]| of.positions(words, lanes, None);
            return Ok(match input.away(tier, of.layout.words(), positions)? {
                Place::Lower(slot) => Some(Held::Away(Away { slot, by: None })),
                Place::First => Some(Held::Open(input.raised(shard, near)?)),
                Place::Behind => None,
            });
        }
        let codec = of.codec.ok_or_else(|| content("a packed page of a head that packs none"))?;
        let [last, by] = [from.word()?, from.word()?];
        sure(last < of.filed && (last..of.filed).contains(&by), "a page packed by a token to come")?;
        let positions = |words: &[u32]| of.positions(words, lanes, Some((codec, last)));
        Ok(match input.away(tier, codec.packed.words(), positions)? {
            Place::Lower(slot) => Some(Held::Away(Away { slot, by: Some(by) })),
            Place::First => {
                let packed = input.raised(shard, near)?;
                Some(Held::Closed(Closed { packed, original: None, last, by, old: false, next: None }))
            }
            Place::Behind => None,
        })
    }
}

/// Adds the extremes of the keys of a page, if they are kept.
pub(crate) fn save_bounds(bounds: Option<&[[f32; LANES]]>, to: &mut Vec<u32>) {
    put_floats(to, bounds.unwrap_or_default().as_flattened());
}

/// Reads what [`save_bounds`] added.
///
/// # Errors
/// It ends early.
pub(crate) fn load_bounds(from: &mut Fields<'_>, layout: &Layout) -> Result<Box<[[f32; LANES]]>, Error> {
    let rows = 2 * bound::rows(layout.k_dim);
    let words = from.slice(rows * LANES)?;
    let floats: Vec<[f32; LANES]> =
        words.as_chunks().0.iter().map(|row: &[u32; LANES]| row.map(f32::from_bits)).collect();
    Ok(floats.into_boxed_slice())
}

impl Entry {
    /// Adds the page.
    pub fn save<'a>(&'a self, layout: &'a Layout, to: &mut Out<'a>) {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let flags = flag(self.tied, TIED) | flag(self.bounds.is_some(), BOUNDED);
        to.fields.extend([self.ordinal, self.fill | flags, self.live, self.pending]);
        self.held.save(layout, self.fill, self.last(), to);
        save_bounds(self.bounds.as_deref(), &mut to.fields);
    }

    /// Reads what [`Entry::save`] added; `None` if the page lies behind what is wanted.
    ///
    /// # Errors
    /// Those of [`Held::load`].
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
        let held = Held::load(from, input, of, Lanes { ordinal, fill, read: live | pending }, near)?;
        let is_gone = matches!(held, Some(Held::Gone { .. }));
        sure(!is_gone || live | pending == 0, "tokens of a page that is gone")?;
        if input.until.is_some() && (is_gone || live != filled(fill)) {
            return Err(SaveError::evicted());
        }
        let bounds = (word & BOUNDED != 0).then(|| load_bounds(from, of.layout)).transpose()?;
        let Some(held) = held else {
            input.behind += fill;
            return Ok(None);
        };
        Ok(Some(Entry { ordinal, held, fill, live, pending, tied: word & TIED != 0, bounds }))
    }
}

impl Chain {
    /// Whether nothing was ever filed in it, so that nothing has to be said of it.
    pub fn is_fresh(&self) -> bool {
        self.next == 0 && self.filed == 0 && self.entries.is_empty()
    }

    /// Adds the run. Evicted pages whose tokens all lie before `kept`, which no rollback reaches, are left out.
    pub fn save<'a>(&'a self, layout: &'a Layout, kept: u32, to: &mut Out<'a>) {
        let is_left = |entry: &Entry| !matches!(entry.held, Held::Gone { last } if last < kept);
        let left = self.entries.iter().filter(|entry| is_left(entry));
        to.fields.extend([self.next, self.aged, self.dead, self.filed, left.clone().count() as u32]);
        left.for_each(|entry| entry.save(layout, to));
        self.kept.save(&mut to.fields, |i| is_left(&self.entries[i]));
    }

    /// Reads what [`Chain::save`] added; `self` is a run without pages, and `gone` how many evicted ones it can
    /// list.
    ///
    /// # Errors
    /// Those of [`Held::load`].
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
        (self.next, self.aged, self.dead, self.filed) = (next, aged, dead, filed);
        self.kept.load(from, pages)
    }
}
