//! Limits on the tokens of a head.

use crate::base::error::ConfigError;
use std::sync::Arc;

/// Tokens that each KV head of a sequence may hold: sinks, ring and pages together. Sinks and ring are kept even above the budget.
///
/// See [`Eviction`](super::Eviction).
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::policy::{Budget, Eviction, SnapKv};
///
/// let eviction = |budget| Eviction::new(SnapKv::default(), budget);
/// let same = eviction(Budget::Tokens(1024));
/// let quarter = eviction(Budget::Share(0.25));
/// let by_layer = eviction(Budget::Layers([2048, 1024, 512].into()));
/// let by_head = eviction(Budget::Heads([vec![Budget::ALL, 256], vec![256, 256]].into()));
/// let bytes = eviction(Budget::Bytes(8 << 20));           // of each layer
/// # let _ = (same, quarter, by_layer, by_head, bytes);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Budget {
    /// The same number of tokens in every head.
    Tokens(u32),
    /// A number for the heads of each layer, such as PyramidKV's ([`PyramidKv::budgets_of`](super::PyramidKv::budgets_of)).
    Layers(Arc<[u32]>),
    /// A number for each KV head of each layer; [`Budget::ALL`] for a head that keeps everything (DuoAttention's retrieval heads).
    Heads(Arc<[Vec<u32>]>),
    /// This share of the tokens appended, rounded up; above 0 and at most 1.
    Share(f32),
    /// Bytes of pages of each layer, converted to the same number of tokens in each head. They cover the ring, the sinks, two pages for
    /// each expert (its newest page, and one that is not compacted yet), and a fifth of the rest for lanes of evicted tokens. Not
    /// covered: pages shared with a fork, pages that a rollback can restore, and packed pages unless whole pages are evicted.
    Bytes(u64),
}

impl Budget {
    /// Budget of a head that keeps every token.
    pub const ALL: u32 = u32::MAX;

    pub(crate) fn check(&self, layer: usize, kv_heads: u32) -> Result<(), ConfigError> {
        let bad = |why: String| Err(ConfigError::TokenBudget { layer, why });
        match self {
            Budget::Layers(layers) if layers.len() <= layer => {
                bad(format!("Budget::Layers has {} numbers, and none for this layer", layers.len()))
            }
            Budget::Heads(heads) if heads.get(layer).is_none_or(|l| l.len() != kv_heads as usize) => {
                let numbers = heads.get(layer).map_or(0, Vec::len);
                bad(format!("Budget::Heads has {numbers} numbers for it; it has {kv_heads} KV heads"))
            }
            Budget::Share(share) if !(*share > 0.0 && *share <= 1.0) => {
                bad(format!("Budget::Share({share}): it must be above 0 and at most 1"))
            }
            _ => Ok(()),
        }
    }

    /// Tokens of a head in a sequence of `len` tokens; `None` for bytes, which depend on page sizes.
    pub(crate) fn tokens(&self, layer: usize, kv_head: usize, len: u32) -> Option<u32> {
        match self {
            Budget::Tokens(n) => Some(*n),
            Budget::Layers(layers) => Some(layers[layer]),
            Budget::Heads(heads) => Some(heads[layer][kv_head]),
            // Slightly less than the share, because 0.1 in f32 is above 0.1: a tenth of 10 is 1.
            Budget::Share(share) => {
                Some((f64::from(len) * f64::from(*share) * (1.0 - f64::from(f32::EPSILON))).ceil() as u32)
            }
            Budget::Bytes(_) => None,
        }
    }
}
