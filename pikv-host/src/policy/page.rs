//! A page as policies know it.

use crate::codec::HeadCodec;
use std::fmt::Debug;
use std::sync::Arc;

/// Tokens of one page of a KV head, wherever it lies; `codec` is the head's.
pub(crate) trait TokenPage: Debug + Sync {
    /// The position at a lane, if it was written.
    fn position(&self, codec: Option<&HeadCodec>, lane: u32) -> Option<u32>;

    /// The words that newer rows read, if the host has them.
    fn words(&self) -> Option<&[u32]>;

    /// A copy of those words from where they are; `None` if that fails.
    fn fetch(&self) -> Option<Arc<[u32]>>;

    /// Which codec packed those words, if one did, and the position of the page's last token.
    fn packing<'a>(&'a self, codec: Option<&'a HeadCodec>) -> Option<(&'a HeadCodec, u32)>;
}
