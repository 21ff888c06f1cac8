//! C_F: evicts from all later layers the tokens of low attention in an early layer, FastV (arXiv 2403.06764).

use super::scores::{falling, finite};
use super::{Budget, Candidates, Eviction, MassFeedback, Policy, Scope, Seen};
use crate::codec::SelectError;
use pikv_core::warp::LANES;

/// Shared name, which makes the layers of both policies evict together.
const NAME: &str = "FastV";

/// The eviction rules of FastV for a model of `layers` layers, each with its layer index. Layer `from - 1` has [`FastVReceived`] and
/// keeps all its tokens; the layers from `from` on evict by the rule of `how`. They are ranked together, by the attention of layer
/// `from - 1` alone, so each of their KV heads evicts the same tokens if `how` gives all layers the same budget of tokens. (Whole pages,
/// and pages of different experts, hold different tokens in each layer.) Earlier layers have no rule.
///
/// The paper's choice is `from` 2 and half of the tokens:
///
/// ```
/// use pikv_host::policy::{Budget, Eviction, fast_v};
/// # use pikv_core::{dtype::Dtype, plan::LayerShape};
/// # let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let mut config = pikv_host::CacheConfig::new(vec![layer; 4], 1 << 20);
/// for (layer, rule) in fast_v(4, 2, |policy| Eviction::new(policy, Budget::Share(0.5)))? {
///     config = config.evict_layer(layer, rule);
/// }
/// assert_eq!(config.evictions.len(), 3);     // layer 1 is looked at, layers 2 and 3 evict
/// # Ok::<(), pikv_host::codec::SelectError>(())
/// ```
///
/// # Errors
/// [`SelectError::Setting`] for a `from` of 0, which has no layer before it, or at or above `layers`.
pub fn fast_v(
    layers: usize,
    from: usize,
    how: impl Fn(FastVFollows) -> Eviction,
) -> Result<Vec<(usize, Eviction)>, SelectError> {
    if from == 0 || from >= layers {
        let range = "at least 1 and below the number of layers";
        return Err(SelectError::Setting { name: "from", value: from as f64, range });
    }
    let ranked = Eviction::new(FastVReceived, Budget::Tokens(u32::MAX));
    let later = (from..layers).map(|layer| (layer, how(FastVFollows)));
    Ok([(from - 1, ranked)].into_iter().chain(later).collect())
}

/// `u` = mean attention received: the mass so far divided by the rows that could see the token, added over all KV heads of the layers
/// with this policy. [`fast_v`] uses it in one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastVReceived;

impl Policy for FastVReceived {
    fn name(&self) -> &str {
        NAME
    }

    fn feedback(&self) -> MassFeedback {
        MassFeedback::All
    }

    fn words(&self) -> usize {
        2
    }

    fn scope(&self) -> Scope {
        Scope::Sequence
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        seen.add(&mut state[0]);
        for t in seen.lanes() {
            state[1][t] += (seen.rows_of(t) * seen.group) as f32;
        }
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        for ((u, sum), rows) in utility.iter_mut().zip(tokens.states(0)).zip(tokens.states(1)) {
            *u = if rows > 0.0 { sum / rows } else { 0.0 };
        }
    }
}

/// `u` = 0: its layers evict the tokens chosen by the sequence's layers with [`FastVReceived`]. It does not use attention of its own layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastVFollows;

impl Policy for FastVFollows {
    fn name(&self) -> &str {
        NAME
    }

    fn scope(&self) -> Scope {
        Scope::Sequence
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn rank(&self, _: &Candidates<'_>, utility: &mut [f32]) {
        utility.fill(0.0);
    }
}

/// Drops a share of the tokens, those that receive the least attention by scores of the caller, from one layer on. In a cache
/// [`fast_v`] does so.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct FastV {
    /// `R`: share to drop of the tokens that are neither sinks nor in the window, at least 0 and below 1. The paper's choice is 0.5.
    pub ratio: f64,
    /// `K`: the first layer that drops tokens; earlier layers keep all. The paper's choice is 2.
    pub from: u32,
    /// First tokens to keep.
    pub sinks: u32,
    /// Newest tokens to keep.
    pub window: u32,
}

setters!(FastV { from: u32, sinks: u32, window: u32 });

impl FastV {
    /// Drops `ratio` from layer 2 on, with 4 sinks and a window of 32.
    pub fn new(ratio: f64) -> FastV {
        FastV { ratio, from: 2, sinks: 4, window: 32 }
    }

    /// One flag a token of `layer`, oldest first: true for the tokens to keep. `received` is the mean attention that each token received
    /// in the layer before [`FastV::from`], over the heads and rows that could see it. Of the `n` tokens that are neither sinks nor in the
    /// window, the `floor(ratio n)` least attended are dropped; of equal ones the newer. O(n log n).
    ///
    /// # Errors
    /// [`SelectError::Setting`] for a ratio out of range, [`SelectError::Score`] for attention that is not finite.
    pub fn keep(&self, layer: u32, received: &[f32]) -> Result<Vec<bool>, SelectError> {
        if !(0.0..1.0).contains(&self.ratio) {
            return Err(SelectError::Setting {
                name: "ratio",
                value: self.ratio,
                range: "at least 0 and below 1",
            });
        }
        finite(received)?;
        let mut keep = vec![true; received.len()];
        let first = received.len().min(self.sinks as usize);
        let last = received.len().saturating_sub(self.window as usize);
        if layer >= self.from && first < last {
            let order = falling(&received[first..last]);
            let drop = (self.ratio * order.len() as f64).floor() as usize;
            for at in order.into_iter().rev().take(drop) {
                keep[first + at] = false;
            }
        }
        Ok(keep)
    }
}
