//! The tokens that a policy ranks.

use crate::base::frequencies::Frequencies;
use crate::codec::HeadCodec;
use crate::policy::page::TokenPage;
use pikv_core::page::{Layout, PAGE};
use pikv_core::warp::LANES;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The tokens of a head that may be evicted, by ascending position.
#[derive(Debug)]
pub struct Candidates<'a> {
    pub(crate) layer: usize,
    pub(crate) kv_head: usize,
    pub(crate) now: u32,
    pub(crate) layout: &'a Layout,
    pub(crate) codec: Option<&'a HeadCodec>,
    /// Their pages, ordered by run and ordinal.
    pub(crate) pages: Vec<Source<'a>>,
    pub(crate) tokens: Vec<Candidate>,
    pub(crate) head: &'a [f32],
    pub(crate) group: u32,
    pub(crate) frequencies: Option<&'a Frequencies>,
    /// Pages read from lower tiers or from a device; `None` if the read failed.
    pub(crate) away: Mutex<HashMap<u64, Option<Arc<[u32]>>>>,
}

/// One of the tokens: small, since there is one for each token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub position: u32,
    /// Index of the page, times 32, plus the lane.
    pub at: u32,
}

/// A page with candidates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub run: u32,
    pub ordinal: u32,
    pub page: &'a dyn TokenPage,
    /// The policy's state of its tokens.
    pub rows: &'a [[f32; LANES]],
}

/// Whether the token at `position` is pinned; `pins` ascend and do not overlap. O(log pins).
pub(crate) fn pinned(pins: &[Range<u32>], position: u32) -> bool {
    let next = pins.partition_point(|pin| pin.end <= position);
    pins.get(next).is_some_and(|pin| pin.contains(&position))
}

impl Candidate {
    /// Index of the page.
    pub fn page(self) -> usize {
        (self.at / PAGE) as usize
    }

    pub fn lane(self) -> u32 {
        self.at % PAGE
    }
}

impl<'a> Candidates<'a> {
    fn source(&self, i: usize) -> (&Source<'a>, usize) {
        let at = self.tokens[i];
        (&self.pages[at.page()], at.lane() as usize)
    }

    /// Index of the layer.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Index of the KV head.
    pub fn kv_head(&self) -> usize {
        self.kv_head
    }

    /// Frequencies of the layer's rotation, if it is scaled ([`CacheConfig::frequencies`](crate::CacheConfig::frequencies)).
    pub fn frequencies(&self) -> Option<&'a Frequencies> {
        self.frequencies
    }

    /// Query heads of the KV head.
    pub fn group(&self) -> u32 {
        self.group
    }

    /// Tokens appended to the sequence so far.
    pub fn now(&self) -> u32 {
        self.now
    }

    /// Number of candidates.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no candidates.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The position of token `i`.
    ///
    /// # Panics
    /// If `i` is not below [`Candidates::len`]; so do the other methods that take `i`.
    pub fn position(&self, i: usize) -> u32 {
        self.tokens[i].position
    }

    /// Word `word` of the policy's state of token `i`.
    pub fn state(&self, i: usize, word: usize) -> f32 {
        let (page, lane) = self.source(i);
        page.rows[word][lane]
    }

    /// Word `word` of the policy's state of each token, in order.
    pub fn states(&self, word: usize) -> impl Iterator<Item = f32> {
        self.tokens.iter().map(move |at| self.pages[at.page()].rows[word][at.lane() as usize])
    }

    /// The policy's state of the head.
    pub fn head(&self) -> &[f32] {
        self.head
    }

    /// An identifier of the page of token `i`: equal for tokens of one page only.
    pub fn page(&self, i: usize) -> u64 {
        let Source { run, ordinal, .. } = *self.source(i).0;
        u64::from(run) << 32 | u64::from(ordinal)
    }

    /// Channels of a key.
    pub fn k_dim(&self) -> usize {
        self.layout.k_dim as usize
    }

    /// Channels of a value.
    pub fn v_dim(&self) -> usize {
        self.layout.v_dim as usize
    }

    /// Reads key and value of token `i`, decoded to f32: `k_dim` and `v_dim` channels. O(k_dim + v_dim). A page in a lower tier or on a
    /// device is read at its first token and held until the ranking ends. If the read fails, the values are NaN, and this ranking evicts
    /// nothing.
    pub fn read(&self, i: usize, key: &mut [f32], value: &mut [f32]) {
        let (Source { page, .. }, lane) = self.source(i);
        let lane = lane as u32;
        let fetched;
        let words = match page.words() {
            Some(words) => words,
            None => {
                let known = self.away().get(&self.page(i)).cloned();
                // Without the lock, because the read may go to another rank or to a store of the user's.
                fetched = match known {
                    Some(known) => known,
                    None => {
                        let read = page.fetch();
                        self.away().entry(self.page(i)).or_insert(read).clone()
                    }
                };
                let Some(words) = &fetched else {
                    key.fill(f32::NAN);
                    value.fill(f32::NAN);
                    return;
                };
                words
            }
        };
        match page.packing(self.codec) {
            Some((codec, last)) => {
                codec.read(words, lane, last, key, value);
            }
            None => {
                self.layout.read_key(words, lane, key);
                self.layout.read_value(words, lane, value);
            }
        }
    }
}

impl Candidates<'_> {
    fn away(&self) -> MutexGuard<'_, HashMap<u64, Option<Arc<[u32]>>>> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether reading a page failed.
    pub(crate) fn failed(&self) -> bool {
        self.away().values().any(Option::is_none)
    }
}
