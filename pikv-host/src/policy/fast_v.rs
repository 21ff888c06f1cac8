//! C_F: tokens that get little attention in an early layer go in all later ones, FastV (arXiv 2403.06764).

use super::{Budget, Candidates, Eviction, Feedback, Policy, Scope, Seen};
use crate::codec::SelectError;
use pikv_core::warp::LANES;

/// The name that makes the layers of the two policies agree.
const NAME: &str = "FastV";

/// The rules of FastV for a model of `layers` layers, each with its layer: layer `from - 1` has [`FastVReceived`] and keeps all it has;
/// the layers from `from` on evict by `how`. They are ranked together, by the attention of layer `from - 1` alone, so the same tokens
/// go in each of their KV heads, as long as `how` gives all the same budget of tokens. (Whole pages, and those of different experts,
/// hold other tokens in each layer.) The layers before have no rule.
///
/// The paper's own choice is `from` 2 and half of the tokens:
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
/// `from` 0, which has no layer before it, or past the last layer.
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

/// `u` = mean attention received: the mass so far over the rows that could see the token, added over all KV heads of the layers that
/// have this policy. [`fast_v`] gives it to one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastVReceived;

impl Policy for FastVReceived {
    fn name(&self) -> &str {
        NAME
    }

    fn feedback(&self) -> Feedback {
        Feedback::Mass
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

/// `u` = 0: what goes is decided by the layers of the sequence that have [`FastVReceived`]. It looks at no attention of its own layer.
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
