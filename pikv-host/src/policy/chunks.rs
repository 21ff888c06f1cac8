//! C_Ch: evicts whole chunks of neighbouring tokens, ChunkKV (arXiv 2502.00299).

use super::{Candidates, Feedback, HeadSeen, Policy, Scope, Seen, Token};
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

    fn feedback(&self) -> Feedback {
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
