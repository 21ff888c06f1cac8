//! The experts of a layer's tokens.

use crate::base::chunks::Chunks;
use crate::base::error::Error;
use crate::base::fields::{Fields, sure};
use crate::config::shape::CacheShape;
use pikv_core::page::PAGE;

/// Experts of the tokens at consecutive positions, `top_k` each, first choice first; nothing is kept for a model with one expert. A layer
/// without a policy or a window keeps those of all tokens; forks share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tags {
    list: Chunks<u16, 1024>,
    /// Position of the first token in the list.
    from: u32,
}

/// Number of tags of `tokens` tokens.
fn count(inner: &CacheShape, tokens: u32) -> usize {
    tokens as usize * inner.config.top_k as usize
}

impl Tags {
    /// Adds the experts of further tokens, `[tokens][top_k]`.
    pub fn add(&mut self, chosen: &[u16]) {
        self.list.extend_from_slice(chosen);
    }

    /// First position with known experts.
    pub fn from(&self) -> u32 {
        self.from
    }

    /// Whether the experts of the tokens at positions `first..end` are known.
    pub fn has(&self, inner: &CacheShape, first: u32, end: u64) -> bool {
        let known = self.list.len() / inner.config.top_k as usize;
        inner.config.experts == 1 || (first >= self.from && end <= u64::from(self.from) + known as u64)
    }

    /// Experts of the token at `position`, first choice first; none if they are not known. Expert 0 for a model with one expert.
    pub fn experts(&self, inner: &CacheShape, position: u32) -> impl Iterator<Item = u16> + use<'_> {
        let (top_k, end) = (inner.config.top_k as usize, self.list.len());
        let at = position.checked_sub(self.from).map_or(end, |row| count(inner, row).min(end));
        let only = (inner.config.experts == 1).then_some(0);
        only.into_iter().chain(self.list.range(at..(at + top_k).min(end)).copied())
    }

    /// Home expert of the token at `position`, which must be known; 0 for a model with one expert.
    pub fn home(&self, inner: &CacheShape, position: u32) -> u16 {
        if inner.config.experts == 1 { 0 } else { self.list[count(inner, position - self.from)] }
    }

    /// Removes those of the tokens from `len` on.
    pub fn truncate(&mut self, inner: &CacheShape, len: u32) {
        if inner.config.experts > 1 {
            self.list.truncate(count(inner, len.saturating_sub(self.from)));
        }
    }

    /// Removes the experts of the tokens before `position`.
    pub fn forget(&mut self, inner: &CacheShape, position: u32) {
        if inner.config.experts > 1 && position > self.from {
            self.list.drop_front(count(inner, position - self.from));
            self.list.tighten();
            self.from = position;
        }
    }

    /// The experts of the tokens before `len`.
    pub fn first(&self, inner: &CacheShape, len: u32) -> Tags {
        let tags = count(inner, len.saturating_sub(self.from)).min(self.list.len());
        let tags = if inner.config.experts > 1 { tags } else { 0 };
        Tags { list: self.list.first(tags), from: self.from }
    }

    /// Bytes of the list, from its capacity.
    pub fn bytes(&self) -> usize {
        self.list.bytes()
    }

    /// Adds the first position, and two experts a word.
    pub fn save(&self, to: &mut Vec<u32>) {
        to.push(self.from);
        let half = |at: usize| self.list.get(at).map_or(0, |tag| u32::from(*tag));
        to.extend((0..self.list.len()).step_by(2).map(|at| half(at) | half(at + 1) << 16));
    }

    /// Reads the data of [`Tags::save`] of a sequence of `len` tokens, whose ring starts at tile `first_tile`.
    ///
    /// # Errors
    /// [`content`](crate::base::fields::content) for invalid data.
    pub fn load(from: &mut Fields<'_>, inner: &CacheShape, len: u32, first_tile: u32) -> Result<Tags, Error> {
        let first = from.word()?;
        let experts = inner.config.experts;
        if experts == 1 {
            sure(first == 0, "experts where there is one")?;
            return Ok(Tags::default());
        }
        let known = first <= first_tile * PAGE && first.is_multiple_of(PAGE);
        sure(known, "tokens of the ring without their experts")?;
        let n = count(inner, len - first);
        let words = from.slice(n.div_ceil(2))?;
        let list: Chunks<u16, 1024> = (0..n).map(|at| (words[at / 2] >> (at % 2 * 16)) as u16).collect();
        sure(list.iter().all(|tag| u32::from(*tag) < experts), "an expert that is not there")?;
        Ok(Tags { list, from: first })
    }
}
