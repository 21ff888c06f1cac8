//! A page in the form that policies read.

use crate::codec::HeadCodec;
use std::fmt::Debug;
use std::sync::Arc;

/// Tokens of one page of a KV head, in whatever memory; `codec` is the head's.
pub(crate) trait TokenPage: Debug + Sync {
    /// The position at a lane, or `None` for a lane that was never written.
    fn position(&self, codec: Option<&HeadCodec>, lane: u32) -> Option<u32>;

    /// The words in the form that newer rows read, if they are in host memory.
    fn words(&self) -> Option<&[u32]>;

    /// A copy of those words, read from wherever they are; `None` if the read fails.
    fn fetch(&self) -> Option<Arc<[u32]>>;

    /// The codec that packed those words, if any, and the position of the page's last token.
    fn packing<'a>(&'a self, codec: Option<&'a HeadCodec>) -> Option<(&'a HeadCodec, u32)>;
}
