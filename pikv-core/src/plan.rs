//! Bytes of a cache, for the planner and the allocator alike.

use crate::page::{Layout, PAGE};
use crate::ring::Ring;
use crate::rope::Rope;

/// One attention layer, as the cache sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerShape {
    /// KV heads.
    pub kv_heads: u32,
    /// Query heads, a multiple of `kv_heads`: query head `h` reads KV head `h / group`.
    pub query_heads: u32,
    /// Widths and dtypes of a head.
    pub layout: Layout,
    /// Sliding window: a row sees itself and the `window - 1` tokens before it, and the sinks.
    pub window: Option<u32>,
    /// Set where keys are stored before their rotation and turned as they are read; queries then come unrotated too.
    pub rope: Option<Rope>,
}

impl LayerShape {
    /// Query heads a KV head.
    ///
    /// # Panics
    /// If there are no KV heads; a cache refuses those.
    pub const fn group(&self) -> u32 {
        self.query_heads / self.kv_heads
    }
}

/// What decides how many pages a sequence takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreShape {
    /// The ring.
    pub ring: Ring,
    /// First positions, filed apart: seen from every window, and not dropped when it moves on.
    pub sinks: u32,
    /// Experts that tokens are filed by.
    pub experts: u32,
}

impl StoreShape {
    /// Whether a token that leaves the ring of `layer` is filed; in a layer whose window is no longer than the ring nobody
    /// will see it again, unless it is a sink.
    pub fn files(&self, layer: &LayerShape, position: u32) -> bool {
        position < self.sinks || layer.window.is_none_or(|w| w > self.ring.window())
    }

    /// Pages that `tokens` more tokens of a run take, where its last page has room for `room`.
    pub const fn run_pages(tokens: u32, room: u32) -> u64 {
        tokens.saturating_sub(room).div_ceil(PAGE) as u64
    }

    /// Pages of one head of `layer` at `len` tokens, of which `filed[e]` lie in the pages of expert `e`.
    pub fn pages_at(&self, len: u32, filed: impl IntoIterator<Item = u32>) -> u64 {
        let sinks = self.ring.left(len).min(self.sinks);
        let pool: u64 = filed.into_iter().map(|n| Self::run_pages(n, 0)).sum();
        u64::from(self.ring.pages(len)) + Self::run_pages(sinks, 0) + pool
    }

    /// Bytes of one layer at `len` tokens: every page of every head, positions and padding included.
    ///
    /// ```
    /// use pikv_core::{dtype::Dtype, page::Layout, plan::*, ring::Ring};
    /// let layout = Layout { k_dim: 128, v_dim: 128, k: Dtype::Bf16, v: Dtype::Bf16 };
    /// let layer = LayerShape { kv_heads: 8, query_heads: 32, layout, window: None, rope: None };
    /// let store = StoreShape { ring: Ring::new(512, 0).unwrap(), sinks: 0, experts: 1 };
    /// // 1024 pages of 32 * (128 + 128) * 2 bytes and 128 bytes of positions, for each of 8 heads.
    /// assert_eq!(store.bytes_at(&layer, 32768, [32768 - 512]), 1024 * 8 * (16384 + 128));
    /// ```
    pub fn bytes_at(&self, layer: &LayerShape, len: u32, filed: impl IntoIterator<Item = u32>) -> u64 {
        self.pages_at(len, filed) * u64::from(layer.kv_heads) * layer.layout.bytes()
    }

    /// The most bytes that one layer holds at `len` tokens, whatever the router chose. A step needs more on its way there: the
    /// pages it fills before it gives others back, and those it copies from forks.
    pub fn bytes_at_most(&self, layer: &LayerShape, len: u32) -> u64 {
        let left = self.ring.left(len);
        let sinks = left.min(self.sinks);
        let filed = if self.files(layer, u32::MAX) { left - sinks } else { 0 };
        let gone = layer.window.map_or(0, |w| len.saturating_sub(w.saturating_add(self.ring.slack())));
        let seen = filed.min(left.saturating_sub(gone.max(self.sinks)));
        // Every expert has a last page, full or not, which stays even if all of it left the window: an expert may go quiet.
        // With a window, another page of it may hold a single token that is still seen.
        let open = filed.min(self.experts);
        let pool = if seen == filed {
            open + (filed - open) / PAGE
        } else {
            let straddling = self.experts.min(seen / 2);
            open + straddling + (seen - 2 * straddling) / PAGE
        };
        let pages = u64::from(self.ring.pages(len)) + Self::run_pages(sinks, 0) + u64::from(pool);
        pages * u64::from(layer.kv_heads) * layer.layout.bytes()
    }
}
