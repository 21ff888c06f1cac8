//! Bytes of a cache, for the planner and the allocator.

use crate::codec::packed::Packed;
use crate::dtype::Dtype;
use crate::page::{Layout, PAGE};
use crate::ring::Ring;
use crate::rope::Rope;

/// One attention layer: heads, layout of a head, sliding window, and rotation.
///
/// ```
/// # mod pikv { pub use pikv_core::{dtype::Dtype, plan::LayerShape}; }
/// use pikv::{Dtype, LayerShape};
///
/// // Gemma 2 9B: 8 KV heads of 256 channels, every other layer with a window of 4096 tokens.
/// let full = LayerShape::new(8, 16, 256, Dtype::Bf16);
/// let local = full.window(4096);
/// let layers: Vec<LayerShape> = (0..42).map(|layer| if layer % 2 == 0 { local } else { full }).collect();
/// assert_eq!(layers[1].group(), 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerShape {
    /// KV heads.
    pub kv_heads: u32,
    /// Query heads, a multiple of `kv_heads`: query head `h` reads KV head `h / (query_heads / kv_heads)`.
    pub query_heads: u32,
    /// Widths and dtypes of a head.
    pub layout: Layout,
    /// Sliding window: a row sees itself and the `window - 1` tokens before it, and the sinks.
    pub window: Option<u32>,
    /// Set if keys are stored before their rotation and rotated when read; queries are then given unrotated too.
    pub rope: Option<Rope>,
}

impl LayerShape {
    /// A layer whose keys and values have `head_dim` channels of `dtype`, without a window or a rotation. `query_heads` must be a
    /// multiple of `kv_heads`: not checked here, but by the cache.
    #[inline(always)]
    pub const fn new(kv_heads: u32, query_heads: u32, head_dim: u32, dtype: Dtype) -> LayerShape {
        LayerShape::with_layout(kv_heads, query_heads, Layout::new(head_dim, dtype))
    }

    /// A layer whose heads have `layout`, without a window or a rotation.
    #[inline(always)]
    pub const fn with_layout(kv_heads: u32, query_heads: u32, layout: Layout) -> LayerShape {
        LayerShape { kv_heads, query_heads, layout, window: None, rope: None }
    }

    /// This shape with values of `v_dim` channels of `v`: [`Layout::values`].
    pub const fn values(mut self, v_dim: u32, v: Dtype) -> LayerShape {
        self.layout = self.layout.values(v_dim, v);
        self
    }

    /// This shape with a sliding window, or with `None` without one.
    pub fn window(mut self, window: impl Into<Option<u32>>) -> LayerShape {
        self.window = window.into();
        self
    }

    /// This shape with keys stored before their rotation, or with `None` stored as given.
    pub fn rope(mut self, rope: impl Into<Option<Rope>>) -> LayerShape {
        self.rope = rope.into();
        self
    }

    /// Query heads per KV head.
    ///
    /// # Panics
    /// If `kv_heads` is 0; a cache rejects such a shape.
    pub const fn group(&self) -> u32 {
        self.query_heads / self.kv_heads
    }
}

/// Ring, sinks and experts: they decide how many pages a sequence takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreShape {
    /// The ring: its window and its slack for rollback.
    pub ring: Ring,
    /// Number of sinks: the first positions, in pages of their own, visible from every window and never dropped.
    pub sinks: u32,
    /// Number of experts that tokens are filed under.
    pub experts: u32,
}

impl StoreShape {
    /// A store with this ring, `sinks` sinks, and the other tokens filed by `experts` experts.
    pub const fn new(ring: Ring, sinks: u32, experts: u32) -> StoreShape {
        StoreShape { ring, sinks, experts }
    }

    /// Whether a token that leaves the ring of `layer` is filed. In a layer whose window is no longer than the ring only sinks are:
    /// no later row sees the other tokens.
    pub fn files(&self, layer: &LayerShape, position: u32) -> bool {
        position < self.sinks || layer.window.is_none_or(|w| w > self.ring.window())
    }

    /// Pages that `tokens` more tokens of a run need if its last page has room for `room`.
    pub const fn run_pages(tokens: u32, room: u32) -> u64 {
        tokens.saturating_sub(room).div_ceil(PAGE) as u64
    }

    /// Pages of one head of `layer` at `len` tokens, of which `filed[e]` are in the pages of expert `e`.
    pub fn pages_at(&self, len: u32, filed: impl IntoIterator<Item = u32>) -> u64 {
        let sinks = self.ring.left(len).min(self.sinks);
        let pool: u64 = filed.into_iter().map(|n| Self::run_pages(n, 0)).sum();
        u64::from(self.ring.pages(len)) + Self::run_pages(sinks, 0) + pool
    }

    /// Bytes of one layer at `len` tokens: every page of every head, positions and padding included.
    ///
    /// ```
    /// # mod pikv {
    /// #     pub use pikv_core::{dtype::Dtype, plan::LayerShape};
    /// #     pub mod shape { pub use pikv_core::{plan::StoreShape, ring::Ring}; }
    /// # }
    /// use pikv::shape::{Ring, StoreShape};
    /// use pikv::{Dtype, LayerShape};
    /// let layer = LayerShape::new(8, 32, 128, Dtype::Bf16);
    /// let store = StoreShape::new(Ring::new(512, 0).unwrap(), 0, 1);
    /// // 1024 pages of 32 * (128 + 128) * 2 bytes and 128 bytes of positions, for each of 8 heads.
    /// assert_eq!(store.bytes_at(&layer, 32768, [32768 - 512]), 1024 * 8 * (16384 + 128));
    /// ```
    pub fn bytes_at(
        &self,
        layer: &LayerShape,
        len: u32,
        filed: impl IntoIterator<Item = impl Into<Filed>>,
    ) -> u64 {
        u64::from(layer.kv_heads) * self.head_bytes_at(layer, None, len, filed)
    }

    /// Bytes of one KV head of one layer at `len` tokens. `packed` is the page format of its codec, `None` for full pages.
    ///
    /// Exact if no 32 tokens of an expert span more than 65,536 positions; each 32 that do need one more packed page.
    pub fn head_bytes_at(
        &self,
        layer: &LayerShape,
        packed: Option<&Packed>,
        len: u32,
        filed: impl IntoIterator<Item = impl Into<Filed>>,
    ) -> u64 {
        let full = layer.layout.bytes();
        let sinks = Self::run_pages(self.ring.left(len).min(self.sinks), 0);
        let mut bytes = (u64::from(self.ring.pages(len)) + sinks) * full;
        for filed in filed {
            let Filed { tokens, recent } = filed.into();
            bytes += match packed {
                None => Self::run_pages(tokens, 0) * full,
                Some(packed) => {
                    let closed = tokens / PAGE;
                    let originals = closed - tokens.saturating_sub(recent) / PAGE;
                    let open = u32::from(!tokens.is_multiple_of(PAGE));
                    u64::from(closed) * packed.bytes() + u64::from(open + originals) * full
                }
            };
        }
        bytes
    }

    /// Most bytes that one layer holds at `len` tokens, for any routing. A step needs more while it runs: pages that it fills before
    /// it frees others, and copies of pages shared with forks.
    pub fn bytes_at_most(&self, layer: &LayerShape, len: u32) -> u64 {
        u64::from(layer.kv_heads) * self.head_bytes_at_most(layer, None, len)
    }

    /// Most bytes that one KV head of one layer holds at `len` tokens, for any routing, with its codec's pages.
    pub fn head_bytes_at_most(&self, layer: &LayerShape, packed: Option<&Packed>, len: u32) -> u64 {
        let left = self.ring.left(len);
        let sinks = left.min(self.sinks);
        let filed = if self.files(layer, u32::MAX) { left - sinks } else { 0 };
        let gone = layer.window.map_or(0, |w| len.saturating_sub(w.saturating_add(self.ring.slack())));
        let seen = filed.min(left.saturating_sub(gone.max(self.sinks)));
        // Every expert keeps its last page, full or not, even if all its tokens left the window: it may get no more tokens.
        // With a window, one more page of the expert may hold a single visible token.
        let open = filed.min(self.experts);
        let pool = if seen == filed {
            open + (filed - open) / PAGE
        } else {
            let straddling = self.experts.min(seen / 2);
            open + straddling + (seen - 2 * straddling) / PAGE
        };
        let full = layer.layout.bytes();
        let fixed = (u64::from(self.ring.pages(len)) + Self::run_pages(sinks, 0)) * full;
        fixed
            + match packed {
                None => u64::from(pool) * full,
                Some(packed) => {
                    // `originals`: full pages kept beside their packed form for rollback. `wide`: pages packed before they are full.
                    let originals = filed.min(self.ring.slack()).min(filed / PAGE + self.experts);
                    let wide = u64::from(self.experts) * u64::from(left >> 16);
                    u64::from(open) * full.max(packed.bytes())
                        + (u64::from(pool - open) + wide) * packed.bytes()
                        + u64::from(originals) * full
                }
            }
    }
}

/// Tokens in the pages of one expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Filed {
    /// Number of tokens.
    pub tokens: u32,
    /// Tokens that a rollback can still remove: those at positions that the ring keeps for rollback.
    pub recent: u32,
}

impl Filed {
    /// These tokens, of which a rollback can still remove the last `recent`.
    pub const fn recent(mut self, recent: u32) -> Filed {
        self.recent = recent;
        self
    }
}

impl From<u32> for Filed {
    /// Tokens that no rollback can remove, as in a cache without rollback.
    fn from(tokens: u32) -> Filed {
        Filed { tokens, recent: 0 }
    }
}
