//! C_Py: token budgets that fall from layer to layer, PyramidKV (arXiv 2406.02069).

use super::scores::{falling, finite};
use crate::codec::SelectError;

/// Token budgets of layers, for [`Budget::Layers`](super::Budget::Layers): an arithmetic series from a large budget in the first layer,
/// where attention is spread, to a small one in the last.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PyramidKv {
    /// `C`: mean budget of a layer, in tokens, including the window. Above the window.
    pub capacity: u32,
    /// `w`: newest tokens, kept in every layer. Default 8.
    pub window: u32,
    /// Slope: the last layer gets `(C - w) / beta` tokens besides the window. At least 1, which is flat; default 20.
    pub beta: f64,
}

setters!(PyramidKv { capacity: u32, window: u32, beta: f64 });

impl PyramidKv {
    /// `capacity` tokens a layer on average, with the defaults of the paper's code.
    pub fn new(capacity: u32) -> PyramidKv {
        PyramidKv { capacity, window: 8, beta: 20.0 }
    }

    /// The budgets of `layers` layers before rounding, in tokens: with `min = (C - w) / beta`, `max = 2 (C - w) - min` and
    /// `step = (max - min) / (layers - 1)`, layer `l` gets `max - l step + w`. Their mean is `C`; a single layer gets `C`.
    ///
    /// # Errors
    /// [`SelectError::Capacity`] for a capacity that is not above the window, [`SelectError::Setting`] for a beta below 1, a capacity of
    /// more than 2147483647, or no layers.
    pub fn shares(&self, layers: u32) -> Result<Vec<f64>, SelectError> {
        self.shares_of(layers, u32::MAX)
    }

    /// [`PyramidKv::shares`] for a prompt of `tokens`, the largest budget that a layer gets. As in the paper's code, `max` is then
    /// `tokens - w`, and `min` grows by the amount that `max` lost, so that the mean stays `C`.
    fn shares_of(&self, layers: u32, tokens: u32) -> Result<Vec<f64>, SelectError> {
        let PyramidKv { capacity, window, beta } = *self;
        if capacity <= window {
            return Err(SelectError::Capacity { capacity, window });
        }
        if capacity > u32::MAX / 2 {
            let range = "at most 2147483647: the first layers get nearly twice as much";
            return Err(SelectError::Setting { name: "capacity", value: capacity.into(), range });
        }
        if !(beta.is_finite() && beta >= 1.0) {
            return Err(SelectError::Setting { name: "beta", value: beta, range: "finite and at least 1" });
        }
        if layers == 0 {
            return Err(SelectError::Setting { name: "layers", value: 0.0, range: "at least 1" });
        }
        if tokens <= capacity || layers == 1 {
            return Ok(vec![f64::from(capacity.min(tokens)); layers as usize]);
        }
        let spread = f64::from(capacity - window);
        let most = (2.0 * spread - spread / beta).min(f64::from(tokens - window));
        let least = 2.0 * spread - most;
        let step = (most - least) / f64::from(layers - 1);
        Ok((0..layers).map(|l| most - f64::from(l) * step + f64::from(window)).collect())
    }

    /// The budgets in whole tokens, if no prompt is shorter than the largest budget. Their sum is exactly `layers * capacity`: each share
    /// is rounded down, and the largest remainders get the rest, of equal ones the lower layer. None is below the window.
    ///
    /// The first layers get up to twice the capacity. For a shorter prompt they keep fewer tokens than their budget, so all layers together
    /// keep less than `layers * capacity`. [`PyramidKv::budgets_of`] gives that difference to later layers.
    ///
    /// # Errors
    /// The same as [`PyramidKv::shares`].
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::policy::PyramidKv;
    /// let budgets = PyramidKv::new(108).budgets(4)?;
    /// assert_eq!(budgets, [203, 140, 76, 13]);
    /// # Ok::<(), pikv::codec::SelectError>(())
    /// ```
    pub fn budgets(&self, layers: u32) -> Result<Vec<u32>, SelectError> {
        self.budgets_of(layers, u32::MAX)
    }

    /// The budgets in whole tokens for a prompt of `tokens`; none is above `tokens`. Their sum is exactly `layers * capacity`, or
    /// `layers * tokens` if the prompt is no longer than the capacity. Tokens that the first layers cannot use are given to the later
    /// layers, and budgets still fall by equal steps, as in the paper's code.
    ///
    /// # Errors
    /// The same as [`PyramidKv::shares`].
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::policy::PyramidKv;
    /// let budgets = PyramidKv::new(108).budgets_of(4, 150)?;
    /// assert_eq!(budgets, [150, 122, 94, 66]);
    /// # Ok::<(), pikv::codec::SelectError>(())
    /// ```
    pub fn budgets_of(&self, layers: u32, tokens: u32) -> Result<Vec<u32>, SelectError> {
        let shares = self.shares_of(layers, tokens)?;
        let mut budgets: Vec<u32> = shares.iter().map(|s| s.floor() as u32).collect();
        let total = u64::from(layers) * u64::from(self.capacity.min(tokens));
        let given: u64 = budgets.iter().map(|b| u64::from(*b)).sum();
        let mut order: Vec<usize> = (0..budgets.len()).collect();
        order.sort_by(|a, b| shares[*b].fract().total_cmp(&shares[*a].fract()));
        // Rounding may put a share slightly above a whole number, and the sum of budgets above the total: take one from the smallest
        // remainders.
        for at in order.iter().take(total.saturating_sub(given) as usize) {
            budgets[*at] += 1;
        }
        for at in order.iter().rev().take(given.saturating_sub(total) as usize) {
            budgets[*at] -= 1;
        }
        Ok(budgets)
    }

    /// One flag a token of `layer`, oldest first: true for the tokens to keep. Keeps the newest `window`, and the best others by `scores`
    /// up to the layer's budget for a prompt of that length ([`PyramidKv::budgets_of`]). Of equal scores the older is kept. O(n log n).
    ///
    /// # Errors
    /// The errors of [`PyramidKv::shares`]; [`SelectError::Layer`] for a layer out of range; [`SelectError::Score`] for a score that is not
    /// finite.
    pub fn keep(&self, layer: u32, layers: u32, scores: &[f32]) -> Result<Vec<bool>, SelectError> {
        let tokens = u32::try_from(scores.len()).unwrap_or(u32::MAX);
        let budgets = self.budgets_of(layers, tokens)?;
        let Some(budget) = budgets.get(layer as usize) else {
            return Err(SelectError::Layer { layer, layers });
        };
        finite(scores)?;
        let old = scores.len().saturating_sub(self.window as usize);
        let mut keep = vec![true; scores.len()];
        keep[..old].fill(false);
        let order = falling(&scores[..old]);
        for at in order.into_iter().take(budget.saturating_sub(self.window) as usize) {
            keep[at] = true;
        }
        Ok(keep)
    }
}
