//! SL: keeps sinks and the newest tokens, StreamingLLM (arXiv 2309.17453).

use super::{Candidates, Policy};

/// `u` = position: the oldest token is evicted first. The first 4 positions are kept as sinks, unless the configuration sets another number
/// ([`CacheConfig::sinks`](crate::CacheConfig::sinks); 0 for none). Evicts single tokens, whatever their expert; a layer with a sliding
/// window needs no policy.
///
/// The paper renumbers positions inside the cache; [`Attend::closed_gaps`](crate::attend::options::Attend::closed_gaps) does so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamingLlm;

impl Policy for StreamingLlm {
    fn name(&self) -> &str {
        "StreamingLLM"
    }

    fn sinks(&self) -> u32 {
        4
    }

    fn oldest_first(&self) -> bool {
        true
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        // Equal utilities are ordered by position.
        debug_assert!(utility.len() == tokens.len());
        utility.fill(0.0);
    }
}
