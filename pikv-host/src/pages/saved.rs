//! Pages on the way to and from a saved sequence.

use crate::base::error::Error;
use crate::base::fields::content;
use crate::memory::arena::{Near, Page, Reservation};
use crate::memory::pool::Pool;
use crate::tiers::StoredPage;
use pikv_core::attend::filled;
use pikv_core::page::{Layout, PAGE};
use pikv_core::warp::LANES;
use std::sync::Arc;

/// Data of a part of a sequence: numbers, and pages in the order of their numbers.
#[derive(Default)]
pub(crate) struct Out<'a> {
    pub fields: Vec<u32>,
    pub pages: Vec<Words<'a>>,
}

impl<'a> Out<'a> {
    /// Splits the data into numbers and pages.
    pub fn apart(self) -> [Out<'a>; 2] {
        let Out { fields, pages } = self;
        [Out { fields, pages: Vec::new() }, Out { fields: Vec::new(), pages }]
    }
}

/// The words of a page.
pub(crate) enum Words<'a> {
    /// All words.
    Page(&'a Page),
    /// Words of some lanes only: other lanes were never written, or by another sequence.
    Part(&'a Page, &'a Layout, u32),
    /// Words of a page in a lower tier.
    Away(&'a Arc<StoredPage>),
}

impl<'a> Words<'a> {
    /// A page of single tokens with `fill` lanes, without those that compaction left free.
    pub fn plain(page: &'a Page, layout: &'a Layout, fill: u32) -> Words<'a> {
        let is_written = |lane: &u32| page.positions()[*lane as usize] != u32::MAX;
        match (0..fill).filter(is_written).fold(0, |lanes, lane| lanes | 1 << lane) {
            u32::MAX => Words::Page(page),
            lanes => Words::Part(page, layout, lanes),
        }
    }

    /// Number of words.
    pub fn len(&self) -> u64 {
        match self {
            Words::Page(page) | Words::Part(page, ..) => page.bytes() / 4,
            Words::Away(slot) => slot.words() as u64,
        }
    }

    /// Passes the words to `to`.
    ///
    /// # Errors
    /// A failed device or lower tier; errors of `to`.
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

/// Sequential source of numbers and pages.
pub(crate) trait Source {
    /// Fills `words` with numbers.
    ///
    /// # Errors
    /// Errors of the reader.
    fn numbers(&mut self, words: &mut [u32]) -> Result<(), Error>;

    /// Fills `words` with the words of a page.
    ///
    /// # Errors
    /// Errors of the reader.
    fn page(&mut self, words: &mut [u32]) -> Result<(), Error>;

    /// The next page as a slot of a lower tier, if the source has it there.
    fn slot(&mut self) -> Option<Arc<StoredPage>> {
        None
    }
}

/// Where a page of a lower tier is restored.
pub(crate) enum Place {
    Lower(Arc<StoredPage>),
    /// No lower tier has room.
    First,
    /// It lies behind the tokens to restore.
    Behind,
}

/// State of a restore.
pub(crate) struct In<'a> {
    pub pool: &'a Pool,
    pub source: &'a mut dyn Source,
    /// Reserved bytes for pages of the first tier.
    pub pages: Reservation,
    /// Words left in the current tensor.
    pub left: u64,
    pub buffer: Vec<u32>,
    /// Only tokens before this position are restored; all if `None`.
    pub until: Option<u32>,
    /// Tokens of the current head in pages behind that.
    pub behind: u32,
}

impl In<'_> {
    fn coming(&mut self, words: u32) -> Result<(), Error> {
        let left = self.left.checked_sub(u64::from(words));
        self.left = left.ok_or_else(|| content("fewer pages than the numbers tell of"))?;
        Ok(())
    }

    /// Reads the next page into the first tier.
    ///
    /// # Errors
    /// Errors of the source; no memory; a failed device.
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

    /// Reads the next page into the first tier; `None` if its first token lies behind the tokens to restore. Its words are then in the
    /// buffer.
    ///
    /// # Errors
    /// Errors of [`In::page`].
    pub fn wanted(&mut self, shard: u32, words: u32, near: Near<'_>) -> Result<Option<Page>, Error> {
        let Some(until) = self.until else { return self.page(shard, words, near).map(Some) };
        self.coming(words)?;
        self.buffer.resize(words as usize, 0);
        self.source.page(&mut self.buffer)?;
        // The number of pages to restore is not known before.
        let is_wanted = self.buffer.first().is_some_and(|first| *first < until);
        is_wanted.then(|| self.reserved(shard, near)).transpose()
    }

    /// A page of the first tier with the words in the buffer; reserves its bytes.
    fn reserved(&mut self, shard: u32, near: Near<'_>) -> Result<Page, Error> {
        let words = self.buffer.len() as u32;
        let mut page = self.pool.arenas.reserve(u64::from(words) * 4)?.take(shard, words, near)?;
        page.put(&self.buffer)?;
        Ok(page)
    }

    /// Reads the next page into tier `tier`, or the first lower one with room. If none has room, or if the page is not to be restored, its
    /// words are in the buffer. `positions` gives the positions of its tokens.
    ///
    /// # Errors
    /// Errors of the source and of `positions`; a failed tier.
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

    /// A page of the first tier with the words in the buffer.
    ///
    /// # Errors
    /// No memory; a failed device.
    pub fn raised(&mut self, shard: u32, near: Near<'_>) -> Result<Page, Error> {
        if self.pool.tiers.is_some() || self.until.is_some() {
            return self.reserved(shard, near);
        }
        let mut page = self.pages.take(shard, self.buffer.len() as u32, near)?;
        page.put(&self.buffer)?;
        Ok(page)
    }
}

/// Whether all lanes are among the first `fill`.
pub(crate) fn within(lanes: u32, fill: u32) -> bool {
    lanes & !filled(fill) == 0
}
