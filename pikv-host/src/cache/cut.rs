//! Forks at earlier lengths, checkpoints, and sealed prefixes.

use crate::base::chunks::Common;
use crate::base::error::{Error, SaveError};
use crate::cache::sequence::Sequence;
use crate::memory::arena::{Lease, Page};
use crate::pages::cut::Cut;
use crate::pages::entry::{Away, PageState};
use crate::pages::filing::LayerPages;
use crate::pages::sealed::Sealed;
use crate::tiers::StoredPage;
use std::collections::{HashSet, VecDeque};
use std::ops::RangeBounds;
use std::sync::Arc;

impl Sequence {
    /// A fork that has only the first `len` tokens. Its later results, evictions and rollbacks have the bits of a sequence that was given
    /// only these tokens. It shares full pages.
    ///
    /// * If the cache has no codec and no policy that evicts, and no sliding window has dropped tokens, `len` can be any length. Tokens
    ///   that the ring of the fork needs are copied into it: at most `ring + rollback` tokens a layer and head, none with one expert, one
    ///   shard and sinks in multiples of 32.
    /// * Otherwise `len` can be any length within [`Sequence::rollback`]; the fork's rollback limit is then that of this sequence at `len`.
    /// * Otherwise the nearest [checkpoint](Sequence::checkpoint) at or before `len` is forked. **The fork may be shorter than `len`**:
    ///   [`Sequence::next_position`] is its length.
    ///
    /// The fork keeps pins; a fork of a checkpoint has the pins of the checkpoint. Pages in lower tiers stay there. O(pages).
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape};
    ///
    /// let layer = LayerShape::new(1, 2, 64, Dtype::Bf16);
    /// let cache = Cache::new(CacheConfig::new(vec![layer], 4 << 20).ring(64))?;
    /// let mut sequence = cache.sequence();
    /// let mut step = cache.begin([(&mut sequence, 500)])?;
    /// step.append(0, &[0.5; 500 * 64], &[0.25; 500 * 64])?;
    /// step.commit()?;
    ///
    /// let fork = sequence.fork_at(123)?;                      // as if 123 tokens had been appended
    /// assert_eq!((fork.next_position().0, fork.in_ring().0), (123, 64));
    /// assert!(matches!(sequence.fork_at(501), Err(Error::Cut { asked: 501, len: 500, .. })));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Cut`] with the possible lengths; [`Error::Poisoned`]; [`Error::OutOfBudget`] if there is no memory for the ring's pages;
    /// [`Error::Tier`] or [`Error::Device`] if pages cannot be read.
    pub fn fork_at(&self, len: u32) -> Result<Sequence, Error> {
        self.sound()?;
        if self.stepping {
            return self.repaired().fork_at(len);
        }
        let oldest = self.len - self.rollback_limit();
        let why = match self.uncut(len) {
            None if len <= self.len => return self.cut(len),
            Some(_) if (oldest..=self.len).contains(&len) => {
                let mut fork = self.fork();
                fork.rollback(self.len - len)?;
                return Ok(fork);
            }
            Some(why) if len <= self.len => why,
            _ => "it has no more tokens",
        };
        let before = self.checkpoints.partition_point(|kept| kept.len <= len);
        match before.checked_sub(1).filter(|_| len <= self.len) {
            Some(i) => {
                let mut fork = self.checkpoints[i].fork();
                fork.checkpoints = self.checkpoints[..before].to_vec();
                fork.lease_of_prefix = self.lease_of_prefix.clone();
                Ok(fork)
            }
            None => Err(Error::Cut {
                asked: len,
                len: self.len,
                why,
                oldest: if self.cuts_anywhere() { 0 } else { oldest },
                checkpoints: self.checkpoints().collect(),
            }),
        }
    }

    /// Whether [`Sequence::fork_at`] can fork at any length from 0 on, without a checkpoint.
    pub(crate) fn cuts_anywhere(&self) -> bool {
        self.uncut(0).is_none()
    }

    /// Reason why a cut out of reach of a rollback is impossible, if any.
    fn uncut(&self, len: u32) -> Option<&'static str> {
        if self.inner.fabric.is_some() {
            return Some("its full pages lie on the ranks of a fabric");
        }
        let pool = &self.inner.pool;
        let layers = self.layers.iter().zip(&self.inner.shape.config.layers);
        layers.map(|(layer, shape)| layer.uncut(&Cut { pool, shape, len })).find(Option::is_some).flatten()
    }

    /// The first `len` tokens of a sequence that has all pages that these need.
    ///
    /// # Errors
    /// [`SaveError::Part`] if experts of tokens are forgotten; the errors of [`Sequence::fork_at`].
    pub(crate) fn first(&self, len: u32) -> Result<Sequence, Error> {
        let pool = &self.inner.pool;
        let mut layers = self.layers.iter().zip(&self.inner.shape.config.layers);
        match layers.find_map(|(layer, shape)| layer.forgot(&Cut { pool, shape, len })) {
            Some(why) => Err(SaveError::Part { why }.into()),
            None => self.cut(len),
        }
    }

    fn cut(&self, len: u32) -> Result<Sequence, Error> {
        span!("cut", tokens = len, from = self.len);
        let inner = self.inner.clone();
        let layers = || self.layers.iter().zip(&inner.shape.config.layers);
        let needed = layers().map(|(layer, shape)| layer.cut_bytes(&Cut { pool: &inner.pool, shape, len }));
        let mut pages = inner.pool.arenas.reserve(needed.sum())?;
        let cut =
            layers().map(|(layer, shape)| layer.cut(&Cut { pool: &inner.pool, shape, len }, &mut pages));
        let layers =
            cut.map(|layer| layer.map(Common::new)).collect::<Result<Vec<Common<LayerPages>>, Error>>()?;
        pages.flush_copies()?;
        let ring = inner.shape.store.ring;
        let mut tickets = self.tickets.clone();
        tickets.cut(len);
        let kept = self.checkpoints.partition_point(|kept| kept.len <= len);
        Ok(Sequence {
            layers,
            len,
            kept: ring.kept_from(len),
            floor: len.saturating_sub(ring.slack()),
            pins: self.pins.clone(),
            poisoned: false,
            stepping: false,
            lease: Lease::new(&inner.pool.arenas),
            tickets,
            ends: VecDeque::new(),
            checkpoints: self.checkpoints[..kept].to_vec(),
            lease_of_prefix: self.lease_of_prefix.clone(),
            altered: false,
            stepped: self.stepped,
            budget: self.budget,
            priority: None,
            inner,
        })
    }

    /// Saves the present state, so that [`Sequence::fork_at`] can return to it at any later time. Needed with a codec or a policy that
    /// evicts, as these discard data. Replaces a checkpoint of the same length.
    ///
    /// A checkpoint is a fork: it shares pages, and keeps pages that the sequence later drops or writes to, first the ring and open pages.
    /// They count in the budget and in [`Sequence::bytes`] until [`Sequence::drop_checkpoints`], a rollback to before the checkpoint, or
    /// [`Sequence::clear`]. [`Sequence::demote`] moves full pages of checkpoints too. Forks share the checkpoints. O(layers); takes no page.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::policy::{Budget, Eviction, StreamingLlm};
    /// use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
    ///
    /// let layer = LayerShape::new(1, 2, 64, Dtype::Bf16);
    /// let config = CacheConfig::new(vec![layer], 4 << 20).ring(64);
    /// let cache = Cache::new(config.evict(Eviction::new(StreamingLlm, Budget::Tokens(128))))?;
    /// let add = |sequence: &mut Sequence, n: usize| -> Result<(), Error> {
    ///     let mut step = cache.begin([(sequence, n as u32)])?;
    ///     step.append(0, &vec![0.5; n * 64], &vec![0.25; n * 64])?;
    ///     step.commit()
    /// };
    /// let mut sequence = cache.sequence();
    /// add(&mut sequence, 100)?;
    /// sequence.checkpoint()?;
    /// add(&mut sequence, 400)?;                               // evicts most of them
    ///
    /// let fork = sequence.fork_at(300)?;                      // the nearest checkpoint
    /// assert_eq!((fork.next_position().0, fork.resident(0, 0)?.0), (100, 100));
    /// assert!(matches!(sequence.fork_at(99), Err(Error::Cut { asked: 99, .. })));
    /// sequence.drop_checkpoints(..);
    /// assert!(sequence.fork_at(300).is_err());
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Poisoned`].
    pub fn checkpoint(&mut self) -> Result<(), Error> {
        self.sound()?;
        self.repair();
        let mut kept = self.copied();
        (kept.checkpoints, kept.lease_of_prefix) = (Vec::new(), None);
        let at = self.checkpoints.partition_point(|other| other.len < self.len);
        match self.checkpoints.get_mut(at) {
            Some(other) if other.len == self.len => *other = Arc::new(kept),
            _ => self.checkpoints.insert(at, Arc::new(kept)),
        }
        Ok(())
    }

    /// Lengths of the checkpoints, ascending.
    pub fn checkpoints(&self) -> impl Iterator<Item = u32> {
        self.checkpoints.iter().map(|kept| kept.len)
    }

    /// Drops the checkpoints of these lengths (`..` for all). Pages that no sequence reads are freed.
    pub fn drop_checkpoints(&mut self, lengths: impl RangeBounds<u32>) {
        self.checkpoints.retain(|kept| !lengths.contains(&kept.len));
    }

    /// Files the tokens of the ring into pages ahead of time, so that forks share these pages. For a prefix that many sequences start with:
    /// seal it, then fork it. Otherwise each fork copies the tokens of the ring into pages of its own later and packs them with the head's
    /// codec, so a prefix no longer than the ring is stored once for each fork.
    ///
    /// Results do not change: forks of a sealed sequence have the bits of forks of an unsealed one. The pages are a copy of at most `ring`
    /// tokens a layer and head; nothing is copied with one expert, one shard and sinks in multiples of 32, where the run takes pages of the
    /// ring. The sequence and its forks hold the pages, in the first tier, until no rollback can bring the last token of the prefix back into
    /// the ring. Each fork applies [`CacheConfig::age`](crate::CacheConfig::age) by itself. A second call does nothing until tokens are
    /// added.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape};
    ///
    /// let layer = LayerShape::new(1, 1, 64, Dtype::Bf16);
    /// let page = layer.layout.bytes();
    /// let cache = Cache::new(CacheConfig::new(vec![layer], 4 << 20).ring(256))?;
    /// let mut prompt = cache.sequence();
    /// let mut step = cache.begin([(&mut prompt, 256)])?;
    /// step.append(0, &[0.5; 256 * 64], &[0.25; 256 * 64])?;
    /// step.commit()?;
    /// prompt.seal()?;
    /// let mut forks: Vec<_> = (0..8).map(|_| prompt.fork()).collect();
    /// let mut step = cache.begin(forks.iter_mut().map(|fork| (fork, 512)))?;
    /// step.append(0, &vec![0.5; 8 * 512 * 64], &vec![0.25; 8 * 512 * 64])?;
    /// step.commit()?;
    /// assert_eq!(cache.usage().taken, (256 + 8 * 512) / 32 * page);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfBudget`], [`Error::OutOfMemory`]; [`Error::Poisoned`]; [`Error::OverFabric`], since each fork sends its full pages to
    /// the ranks; [`Error::Device`]. The sequence is unchanged then.
    pub fn seal(&mut self) -> Result<(), Error> {
        span!("seal", tokens = self.len);
        self.sound()?;
        self.repair();
        let inner = self.inner.clone();
        if inner.fabric.is_some() {
            let why = "full pages go to the ranks, once for each fork";
            return Err(Error::OverFabric { what: "sealing a sequence", why });
        }
        let layers = || self.layers.iter().zip(&inner.shape.config.layers);
        let needed = layers().map(|(layer, shape)| layer.seal_bytes(&inner.shape, shape, self.len));
        let mut pages = inner.pool.arenas.reserve(needed.sum())?;
        let sealed = layers().map(|(layer, shape)| layer.seal(&inner.shape, shape, self.len, &mut pages));
        let sealed = sealed.collect::<Result<Vec<Sealed>, Error>>()?;
        pages.flush_copies()?;
        self.layers.iter_mut().zip(sealed).for_each(|(layer, sealed)| layer.take_sealed(sealed));
        Ok(())
    }

    /// Replaces pages of the first `until` tokens by pages of another sequence that has the same tokens there.
    pub(crate) fn share(&mut self, other: &Sequence, until: u32) {
        let inner = self.inner.clone();
        let shapes = inner.shape.config.layers.iter();
        for ((layer, other), shape) in self.layers.iter_mut().zip(&other.layers).zip(shapes) {
            layer.share(other, &Cut { pool: &inner.pool, shape, len: until });
        }
    }

    /// Calls `told` for every page of the first tier that the sequence refers to, for some pages several times.
    pub(crate) fn each_page(&self, told: &mut dyn FnMut(&Page)) {
        for layer in &self.layers {
            for head in &layer.heads {
                head.ring.iter().for_each(&mut *told);
                let entries = head.runs.iter().flat_map(|(_, run)| &run.entries);
                entries.flat_map(|entry| entry.held.pages()).for_each(&mut *told);
            }
            layer.past.pages().flat_map(|held| held.pages()).for_each(&mut *told);
            layer.sealed.iter().flat_map(Sealed::pages).for_each(&mut *told);
        }
        self.checkpoints.iter().for_each(|kept| kept.each_page(told));
    }

    /// Calls `told` for every page of a lower tier that the sequence refers to, for some pages several times.
    pub(crate) fn each_slot(&self, told: &mut dyn FnMut(&Arc<StoredPage>)) {
        for layer in &self.layers {
            let entries = layer.heads.iter().flat_map(|head| head.runs.iter());
            let held = entries.flat_map(|(_, run)| &run.entries).map(|entry| &entry.held);
            let ahead = layer.sealed.iter().flat_map(Sealed::held);
            for held in held.chain(layer.past.pages()).chain(ahead) {
                if let PageState::Away(Away { slot, .. }) = held {
                    told(slot);
                }
            }
        }
        self.checkpoints.iter().for_each(|kept| kept.each_slot(told));
    }

    /// Bytes of the sequence's pages in the first tier, each counted once.
    pub(crate) fn distinct_bytes(&self) -> u64 {
        let (mut seen, mut bytes) = (HashSet::new(), 0);
        self.each_page(&mut |page| {
            if seen.insert(page.key()) {
                bytes += page.bytes();
            }
        });
        bytes
    }
}
