//! SL: sinks and the newest tokens, StreamingLLM (arXiv 2309.17453).

use super::{Candidates, Policy};

/// `u` = position: the oldest goes first. The first 4 positions stay as sinks, unless the configuration names another number
/// ([`CacheConfig::sinks`](crate::CacheConfig::sinks); 0 is none). The newest tokens are kept one by one here,
/// whatever their expert, while a sliding window of a layer needs no policy.
///
/// The paper gives tokens new positions inside the cache; [`Attend::closed_gaps`](crate::attend::options::Attend::closed_gaps) does.
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
        // Equal utilities already go by position.
        debug_assert!(utility.len() == tokens.len());
        utility.fill(0.0);
    }
}
