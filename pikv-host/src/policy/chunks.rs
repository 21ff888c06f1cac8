//! C_Ch: evicts whole chunks of neighbouring tokens, ChunkKV (arXiv 2502.00299).

use super::scores::{finite, order};
use super::{Candidates, HeadSeen, MassFeedback, OptionError, Policy, Scope, Seen, Token};
use crate::codec::SelectError;
use pikv_core::rope::Rope;
use pikv_core::warp::LANES;
use std::num::NonZeroU32;

/// Averages the utilities of another policy over chunks: positions `0..size`, `size..2 size` and so on. If the budget ends within a
/// chunk, its older tokens are evicted. In all else it is the other policy: the same feedback, sinks, state, threshold and so on.
#[derive(Clone, Copy, Debug)]
pub struct Chunks<P> {
    of: P,
    size: NonZeroU32,
}

impl<P: Policy> Chunks<P> {
    /// Chunks of `size` positions, ranked by `of`; the paper uses 10 with SnapKV's scores.
    pub fn new(of: P, size: NonZeroU32) -> Chunks<P> {
        Chunks { of, size }
    }
}

// Forwards every method but `name`, `parameters` and `rank`; the lint finds one that was left to its default.
#[deny(clippy::missing_trait_methods)]
impl<P: Policy> Policy for Chunks<P> {
    fn name(&self) -> &str {
        "ChunkKV"
    }

    fn parameters(&self, to: &mut dyn FnMut(&[u8])) {
        to(&self.size.get().to_le_bytes());
        to(self.of.name().as_bytes());
        self.of.parameters(to);
    }

    fn check(&self) -> Result<(), OptionError> {
        self.of.check()
    }

    fn feedback(&self) -> MassFeedback {
        self.of.feedback()
    }

    fn wants_hits(&self) -> bool {
        self.of.wants_hits()
    }

    fn rotation(&self) -> Option<Rope> {
        self.of.rotation()
    }

    fn sinks(&self) -> u32 {
        self.of.sinks()
    }

    fn words(&self) -> usize {
        self.of.words()
    }

    fn head_words(&self, k_dim: usize, group: usize) -> usize {
        self.of.head_words(k_dim, group)
    }

    fn scope(&self) -> Scope {
        self.of.scope()
    }

    fn reads_tokens(&self) -> bool {
        self.of.reads_tokens()
    }

    fn born(&self, token: &Token<'_>, state: &mut [f32]) {
        self.of.born(token, state);
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        self.of.observe(seen, state);
    }

    fn observe_head(&self, seen: &HeadSeen<'_>, state: &mut [f32]) {
        self.of.observe_head(seen, state);
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        self.of.rank(tokens, utility);
        let chunk = |i: usize| tokens.position(i) / self.size;
        let mut first = 0;
        while first < utility.len() {
            let end = (first..utility.len()).find(|i| chunk(*i) != chunk(first)).unwrap_or(utility.len());
            let mean = utility[first..end].iter().sum::<f32>() / (end - first) as f32;
            utility[first..end].fill(mean);
            first = end;
        }
    }

    /// Means of chunks keep the order by age, and of equals the older is evicted first.
    fn oldest_first(&self) -> bool {
        self.of.oldest_first()
    }

    fn lean(&self, head: &[f32]) -> Option<f32> {
        self.of.lean(head)
    }

    fn threshold(&self, head: &[f32]) -> Option<f32> {
        self.of.threshold(head)
    }
}

/// Selects chunks of neighbouring tokens in place of single tokens, by scores of the caller, so that text that belongs together is kept
/// together. In a cache [`Chunks`] does so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChunkKv {
    /// Tokens of a chunk, at least 1. The paper's choice is 10; a page of pikv has 32.
    pub chunk: u32,
    /// Tokens to keep at most.
    pub budget: u32,
}

impl ChunkKv {
    /// Chunks of `chunk` tokens; at most `budget` tokens are kept.
    pub const fn new(chunk: u32, budget: u32) -> ChunkKv {
        ChunkKv { chunk, budget }
    }

    /// One flag a token, oldest first: true for the tokens to keep, by their `scores`. A chunk's score is the mean of its tokens' scores,
    /// in f64; the last chunk may be shorter. Chunks are taken by falling score while they fit in the budget; of equal scores the older
    /// is first. A chunk that does not fit is skipped, so only a shorter last chunk can be taken after it. O(n log n).
    ///
    /// # Errors
    /// [`SelectError::Setting`] for chunks of no tokens, or a budget that is below both one chunk and the number of tokens;
    /// [`SelectError::Score`] for a score that is not finite.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::policy::ChunkKv;
    /// let keep = ChunkKv::new(2, 2).keep(&[0.9, 0.0, 0.5, 0.5, 0.1])?;
    /// assert_eq!(keep, [false, false, true, true, false]);
    /// # Ok::<(), pikv::codec::SelectError>(())
    /// ```
    pub fn keep(&self, scores: &[f32]) -> Result<Vec<bool>, SelectError> {
        let (chunk, mut left) = (self.chunk as usize, self.budget as usize);
        if chunk == 0 {
            return Err(SelectError::Setting { name: "chunk", value: 0.0, range: "at least 1" });
        }
        if left < chunk.min(scores.len()) {
            let range = "at least one chunk, or all tokens";
            return Err(SelectError::Setting { name: "budget", value: left as f64, range });
        }
        finite(scores)?;
        let mean = |c: &[f32]| c.iter().map(|s| f64::from(*s)).sum::<f64>() / c.len() as f64;
        let means: Vec<f64> = scores.chunks(chunk).map(mean).collect();
        let mut chunks: Vec<usize> = (0..means.len()).collect();
        chunks.sort_by(|a, b| order(means[*b], means[*a]));
        let mut keep = vec![false; scores.len()];
        for at in chunks {
            let tokens = at * chunk..scores.len().min((at + 1) * chunk);
            if tokens.len() <= left {
                left -= tokens.len();
                keep[tokens].fill(true);
            }
        }
        Ok(keep)
    }
}
