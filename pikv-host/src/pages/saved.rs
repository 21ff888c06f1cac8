//! Pages of a sequence on their way to where it is saved, and back.

use crate::base::error::Error;
use crate::base::fields::content;
use crate::memory::arena::{Near, Page, Reservation};
use crate::memory::pool::Pool;
use crate::tiers::Stored;
use pikv_core::attend::filled;
use pikv_core::page::{Layout, PAGE};
use pikv_core::warp::LANES;
use std::sync::Arc;

/// What is saved of a part of a sequence: numbers, and pages in the order in which the numbers tell of them.
#[derive(Default)]
pub(crate) struct Out<'a> {
    pub fields: Vec<u32>,
    pub pages: Vec<Words<'a>>,
}

impl<'a> Out<'a> {
    /// The numbers alone, and the pages alone.
    pub fn apart(self) -> [Out<'a>; 2] {
        let Out { fields, pages } = self;
        [Out { fields, pages: Vec::new() }, Out { fields: Vec::new(), pages }]
    }
}

/// The words of a page.
pub(crate) enum Words<'a> {
    /// All of them.
    Page(&'a Page),
    /// Of some lanes only: what lies in others was never written, or by another sequence.
    Part(&'a Page, &'a Layout, u32),
    /// Those of a lower tier.
    Away(&'a Arc<Stored>),
}

impl<'a> Words<'a> {
    /// A page of single tokens, of which the first `fill` lanes were written, but for those that stayed free when tokens were put together.
    pub fn plain(page: &'a Page, layout: &'a Layout, fill: u32) -> Words<'a> {
        let is_written = |lane: &u32| page.positions()[*lane as usize] != u32::MAX;
        match (0..fill).filter(is_written).fold(0, |lanes, lane| lanes | 1 << lane) {
            u32::MAX => Words::Page(page),
            lanes => Words::Part(page, layout, lanes),
        }
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        match self {
            Words::Page(page) | Words::Part(page, ..) => page.bytes() / 4,
            Words::Away(slot) => slot.words() as u64,
        }
    }

    /// Passes them on.
    ///
    /// # Errors
    /// A device or a lower tier that fails; those of `to`.
    pub fn give(&self, to: impl FnOnce(&[u32]) -> Result<(), Error>) -> Result<(), Error> {
        match self {
            Words::Page(page) => to(&page.fetch()?),
            Words::Part(page, layout, lanes) => {
                let words = page.fetch()?;
                let mut part = vec![u32::MAX; words.len()];
                let written = (0..PAGE).filter(|lane| lanes >> lane & 1 == 1);
                written.for_each(|lane| layout.copy(&words, lane, &mut part, lane));
                to(&part)
            }
            Words::Away(slot) => match slot.in_place() {
                Some(words) => to(words),
                None => to(&slot.read()?),
            },
        }
    }
}

/// Where numbers and pages come from, one after the other.
pub(crate) trait Source {
    /// Fills `words` with numbers.
    ///
    /// # Errors
    /// The reader's.
    fn numbers(&mut self, words: &mut [u32]) -> Result<(), Error>;

    /// Fills `words` with those of a page.
    ///
    /// # Errors
    /// The reader's.
    fn page(&mut self, words: &mut [u32]) -> Result<(), Error>;

    /// The next page where it lies in a lower tier, if that is where it comes from.
    fn slot(&mut self) -> Option<Arc<Stored>> {
        None
    }
}

/// Where a page that lay in a lower tier is to be.
pub(crate) enum Place {
    Lower(Arc<Stored>),
    /// No lower tier has room.
    First,
    /// It lies behind what is wanted.
    Behind,
}

/// What pages are restored from, and to.
pub(crate) struct In<'a> {
    pub pool: &'a Pool,
    pub source: &'a mut dyn Source,
    /// What was set aside for pages of the first tier.
    pub pages: Reservation,
    /// Words of the present tensor that are still to come.
    pub left: u64,
    pub buffer: Vec<u32>,
    /// Of the tokens those before this position are wanted only, if not all are.
    pub until: Option<u32>,
    /// Tokens of the present head in pages behind that.
    pub behind: u32,
}

impl In<'_> {
    fn coming(&mut self, words: u32) -> Result<(), Error> {
        let left = self.left.checked_sub(u64::from(words));
        self.left = left.ok_or_else(|| content("fewer pages than the numbers tell of"))?;
        Ok(())
    }

    /// The next page, in the first tier.
    ///
    /// # Errors
    /// The source's; no memory; a device that fails.
    pub fn page(&mut self, shard: u32, words: u32, near: Near<'_>) -> Result<Page, Error> {
        self.coming(words)?;
        let mut page = self.pages.take(shard, words, near)?;
        let is_near = page.is_near();
        match page.words_mut().filter(|_| is_near) {
            Some(to) => self.source.page(to)?,
            None => {
                self.buffer.resize(words as usize, 0);
                self.source.page(&mut self.buffer)?;
                page.put(&self.buffer)?;
            }
        }
        Ok(page)
    }

    /// The next page, in the first tier, or `None` if its first token lies behind what is wanted; its words are in the buffer then.
    ///
    /// # Errors
    /// Those of [`In::page`].
    pub fn wanted(&mut self, shard: u32, words: u32, near: Near<'_>) -> Result<Option<Page>, Error> {
        let Some(until) = self.until else { return self.page(shard, words, near).map(Some) };
        self.coming(words)?;
        self.buffer.resize(words as usize, 0);
        self.source.page(&mut self.buffer)?;
        // How many pages are wanted shows as they come.
        let is_wanted = self.buffer.first().is_some_and(|first| *first < until);
        is_wanted.then(|| self.reserved(shard, near)).transpose()
    }

    /// A page of the first tier with what is in the buffer, for which nothing was set aside.
    fn reserved(&mut self, shard: u32, near: Near<'_>) -> Result<Page, Error> {
        let words = self.buffer.len() as u32;
        let mut page = self.pool.arenas.reserve(u64::from(words) * 4)?.take(shard, words, near)?;
        page.put(&self.buffer)?;
        Ok(page)
    }

    /// The next page, in tier `tier` or the first one beneath that has room; if none has, or if it is not wanted, its words are in the buffer.
    /// `positions` says where its tokens are.
    ///
    /// # Errors
    /// The source's; a tier that fails; those of `positions`.
    pub fn away(
        &mut self,
        tier: usize,
        words: u32,
        positions: impl FnOnce(&[u32]) -> Result<[u32; LANES], Error>,
    ) -> Result<Place, Error> {
        self.coming(words)?;
        if let Some(slot) = self.source.slot() {
            return Ok(Place::Lower(slot));
        }
        self.buffer.resize(words as usize, 0);
        self.source.page(&mut self.buffer)?;
        let positions = positions(&self.buffer)?;
        if self.until.is_some_and(|until| positions[0] >= until) {
            return Ok(Place::Behind);
        }
        let levels = self.pool.tiers.iter().flat_map(|tiers| &tiers.levels).skip(tier.saturating_sub(1));
        for level in levels {
            match level.put(&self.buffer, positions) {
                Ok(slot) => return Ok(Place::Lower(Arc::new(slot))),
                Err(Error::TierFull { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Place::First)
    }

    /// A page of the first tier with what is in the buffer.
    ///
    /// # Errors
    /// No memory; a device that fails.
    pub fn raised(&mut self, shard: u32, near: Near<'_>) -> Result<Page, Error> {
        if self.pool.tiers.is_some() || self.until.is_some() {
            return self.reserved(shard, near);
        }
        let mut page = self.pages.take(shard, self.buffer.len() as u32, near)?;
        page.put(&self.buffer)?;
        Ok(page)
    }
}

/// Whether no lane but the first `fill` is named.
pub(crate) fn within(lanes: u32, fill: u32) -> bool {
    lanes & !filled(fill) == 0
}
