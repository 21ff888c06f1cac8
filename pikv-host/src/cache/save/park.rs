//! Parked sequences: all pages in lower tiers.

use super::header;
use super::restore::Tensors;
use crate::base::error::{Error, SaveError};
use crate::base::fields::{Fields, content};
use crate::cache::Cache;
use crate::cache::inner::Inner;
use crate::cache::sequence::Sequence;
use crate::pages::saved::{In, Out, Source, Words};
use crate::tiers::{Level, StoredPage};
use pikv_core::page::Position;
use pikv_core::warp::LANES;
use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;

/// A sequence in a lower tier: [`Sequence::park`] makes it, [`Parked::wake`] turns it back into a sequence. It has no page in the first
/// tier, so it cannot be in a step. Dropping it frees its pages.
#[derive(Debug)]
pub struct Parked {
    inner: Arc<Inner>,
    parts: Vec<ParkedPart>,
    len: u32,
    /// Bytes of pages that were in the first tier.
    here: u64,
    /// Budget of the sequence.
    budget: Option<u32>,
}

/// One part of the sequence: numbers, and pages in order.
#[derive(Debug)]
struct ParkedPart {
    fields: Vec<u32>,
    pages: Vec<Arc<StoredPage>>,
}

impl ParkedPart {
    fn out(&self) -> Out<'_> {
        Out { fields: self.fields.clone(), pages: self.pages.iter().map(Words::Away).collect() }
    }
}

/// Copies of full pages of the first tier, by [`Page::key`](crate::memory::arena::Page::key), while the sequences that are parked hold these
/// pages: so nobody writes to them.
type PageCopies = HashMap<usize, Arc<StoredPage>>;

/// Writes a page to the first of `levels` that has room, unless `copies` has it; a page in a lower tier stays there.
///
/// # Errors
/// [`Error::TierFull`] of the last level if all are full; [`Error::Tier`], [`Error::Device`].
fn lower(page: &Words<'_>, levels: &[Arc<Level>], copies: &mut PageCopies) -> Result<Arc<StoredPage>, Error> {
    let key = match page {
        Words::Away(slot) => return Ok((*slot).clone()),
        Words::Page(page) => Some(page.key()),
        // Its other lanes may have tokens of another sequence.
        Words::Part(..) => None,
    };
    if let Some(slot) = key.and_then(|key| copies.get(&key)) {
        return Ok(slot.clone());
    }
    let mut slot = Err(Error::NoTiers);
    page.give(|words| {
        for level in levels {
            slot = level.put(words, [u32::MAX; LANES]);
            if !matches!(slot, Err(Error::TierFull { .. })) {
                break;
            }
        }
        Ok(())
    })?;
    let slot = Arc::new(slot?);
    copies.extend(key.map(|key| (key, slot.clone())));
    Ok(slot)
}

impl Cache {
    /// Parks several sequences as [`Sequence::park`], all or none; returns them in order. A full page that several of them share, such as
    /// those of a prompt of which they are forks, is written once, and they share it in the lower tier, where `park` of each would write it
    /// for each. [`Parked::wake`] makes pages of its own for each. O(bytes).
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::tiers::Tiers;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let config = CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 1 << 20);
    /// let cache = Cache::new(config.tiers(Tiers::new().host(1 << 20)))?;
    /// let mut prompt = cache.sequence();
    /// let mut step = cache.begin([(&mut prompt, 320)])?;
    /// step.append(0, &[0.5; 320 * 4], &[0.25; 320 * 4])?;
    /// step.commit()?;
    ///
    /// let mut fork = prompt.fork();
    /// let parked = cache.park([&mut prompt, &mut fork], 1)?;
    /// assert_eq!(cache.usage().taken, 0);
    /// assert_eq!(cache.usage().tiers[0].bytes, parked[0].bytes());
    /// assert_eq!(parked[1].wake()?.next_position().0, 320);
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ForeignSequence`], and the errors of [`Sequence::park`]. All sequences are unchanged then.
    pub fn park<'s>(
        &self,
        sequences: impl IntoIterator<Item = &'s mut Sequence>,
        tier: usize,
    ) -> Result<Vec<Parked>, Error> {
        let (inner, mut sequences) = (&self.inner, self.sound(sequences)?);
        if inner.fabric.is_some() {
            return Err(SaveError::Fabric.into());
        }
        let levels = inner.pool.tiers.as_ref().and_then(|tiers| tiers.levels.get(tier.checked_sub(1)?..));
        let levels = levels.filter(|levels| !levels.is_empty()).ok_or(Error::NoTiers)?;
        let mut copies = PageCopies::new();
        let mut parked = |sequence: &&mut Sequence| {
            let parts = sequence.parts(header::version(&inner.shape, sequence.budget, false));
            let near =
                parts.iter().flat_map(|part| &part.pages).filter(|page| !matches!(page, Words::Away(_)));
            let here = near.map(|page| 4 * page.len()).sum();
            let part = |part: Out<'_>| {
                let pages = part.pages.iter().map(|page| lower(page, levels, &mut copies));
                Ok(ParkedPart { pages: pages.collect::<Result<_, Error>>()?, fields: part.fields })
            };
            let parts = parts.into_iter().map(part).collect::<Result<_, Error>>()?;
            Ok(Parked { inner: inner.clone(), parts, len: sequence.len, here, budget: sequence.budget })
        };
        let parked = sequences.iter().map(&mut parked).collect::<Result<_, Error>>()?;
        sequences.iter_mut().for_each(|sequence| sequence.clear());
        Ok(parked)
    }
}

impl Sequence {
    /// Moves the whole sequence to tier `tier` (1 is the first lower tier) or, if that is full, to the next one below. Unlike
    /// [`Sequence::demote`], this includes the ring, open pages and pages for rollbacks. This sequence is empty afterwards; the returned
    /// [parked](crate::save::Parked) sequence can be kept, saved, or woken. Its bytes in the first tier are freed, except for pages that a
    /// fork reads. Forks that [`Cache::park`] parks together share in the tier what they shared before. The policies' state of tokens stays
    /// in host memory; [checkpoints](Sequence::checkpoint) are dropped. O(bytes).
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::tiers::Tiers;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let config = CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 1 << 20);
    /// let cache = Cache::new(config.tiers(Tiers::new().host(1 << 20)))?;
    /// let mut sequence = cache.sequence();
    /// let mut step = cache.begin([(&mut sequence, 100)])?;
    /// step.append(0, &[0.5; 100 * 4], &[0.25; 100 * 4])?;
    /// step.commit()?;
    ///
    /// let parked = sequence.park(1)?;
    /// assert_eq!((cache.usage().taken, parked.next_position().0), (0, 100));
    /// let sequence = parked.wake()?;
    /// assert_eq!(sequence.next_position().0, 100);
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoTiers`] without such a tier, [`Error::TierFull`] if no tier has room, [`Error::Tier`]; [`Error::Poisoned`],
    /// [`SaveError::Fabric`]; [`Error::Device`]. The sequence is unchanged then.
    pub fn park(&mut self, tier: usize) -> Result<Parked, Error> {
        let mut parked = self.cache().park([self], tier)?;
        let Some(parked) = parked.pop() else { unreachable!("one for each sequence") };
        Ok(parked)
    }
}

impl Parked {
    /// Tokens of the sequence; equals the position of the next token.
    pub fn next_position(&self) -> Position {
        Position(self.len)
    }

    /// Bytes of its pages, all of them in lower tiers, including those that it shares there.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().flat_map(|part| &part.pages).map(|page| page.bytes()).sum()
    }

    /// Bytes of the first tier that [`Parked::wake`] takes: those of pages that were there.
    pub fn bytes_to_wake(&self) -> u64 {
        self.here
    }

    /// Bytes of host memory besides pages.
    pub fn table_bytes(&self) -> u64 {
        let part = |part: &ParkedPart| {
            4 * part.fields.capacity() + size_of::<Arc<StoredPage>>() * part.pages.capacity()
        };
        let slots = self.parts.iter().map(|part| part.pages.len() * size_of::<StoredPage>()).sum::<usize>();
        (self.parts.iter().map(part).sum::<usize>() + self.parts.capacity() * size_of::<ParkedPart>() + slots)
            as u64
    }

    /// Makes a sequence that continues with the bits of the parked one. Pages that were in a lower tier before it was parked stay there,
    /// the others move to the first tier. The parked sequence remains, so a second call makes a second sequence. As
    /// [`Cache::begin`](crate::Cache::begin) does, it makes room from idle prefixes, then by parking [`Parkable`](crate::save::Parkable)
    /// sequences. O(bytes).
    ///
    /// # Errors
    /// [`Error::OutOfBudget`] if the pages do not fit, [`Error::OutOfMemory`]; [`Error::Tier`], [`Error::Device`]. Nothing changes then.
    pub fn wake(&self) -> Result<Sequence, Error> {
        self.wake_for(None)
    }

    /// [`Parked::wake`]; parks no sequence of higher priority.
    pub(crate) fn wake_for(&self, priority: Option<i32>) -> Result<Sequence, Error> {
        let inner = &self.inner;
        let mut sequence = Sequence::new(inner.clone());
        let (here, _) = sequence.load_numbers(self.version(), &mut Fields::new(&self.parts[0].fields))?;
        let pages = inner.reserve(here, priority)?;
        let numbers = self.parts.iter().flat_map(|part| &part.fields).skip(self.parts[0].fields.len());
        let slots = self.parts.iter().flat_map(|part| &part.pages);
        let mut source = Slots { numbers, slots };
        let tensors = header::tensors(self.version(), &inner.shape);
        let elements = self.elements();
        let mut tensors = Tensors::new(&tensors, &elements);
        tensors.next();
        let mut from = In {
            pool: &inner.pool,
            source: &mut source,
            pages,
            left: 0,
            buffer: Vec::new(),
            until: None,
            behind: 0,
        };
        sequence.load_layers(&mut from, &mut tensors)?;
        drop(from);
        Ok(sequence)
    }

    /// Writes the sequence as [`Sequence::save`].
    ///
    /// # Errors
    /// The errors of [`Sequence::save`].
    pub fn save(&self, note: &[u8], to: &mut impl Write) -> Result<u64, Error> {
        let parts: Vec<Out<'_>> = self.parts.iter().map(ParkedPart::out).collect();
        super::write_parts(self.version(), &self.inner.shape, &parts, note, to)
    }

    fn version(&self) -> u64 {
        header::version(&self.inner.shape, self.budget, false)
    }

    /// Words of each part.
    fn elements(&self) -> Vec<u64> {
        let part = |part: &ParkedPart| match part.pages.is_empty() {
            true => part.fields.len() as u64,
            false => part.pages.iter().map(|page| page.words() as u64).sum(),
        };
        self.parts.iter().map(part).collect()
    }
}

/// Numbers and pages of a parked sequence.
struct Slots<N, S> {
    numbers: N,
    slots: S,
}

impl<'p, N: Iterator<Item = &'p u32>, S: Iterator<Item = &'p Arc<StoredPage>>> Source for Slots<N, S> {
    fn numbers(&mut self, words: &mut [u32]) -> Result<(), Error> {
        for word in words {
            *word = *self.numbers.next().ok_or_else(|| content("it ends early"))?;
        }
        Ok(())
    }

    fn page(&mut self, words: &mut [u32]) -> Result<(), Error> {
        self.slots.next().map_or_else(|| Err(content("it ends early")), |slot| slot.read_into(words))
    }

    fn slot(&mut self) -> Option<Arc<StoredPage>> {
        self.slots.next().cloned()
    }
}
