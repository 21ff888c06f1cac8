//! C_Py: token budgets that fall from layer to layer, PyramidKV (arXiv 2406.02069).

use super::SelectError;
use super::c_ch::{check, falling};

/// Tokens that each layer keeps: an arithmetic series from many in the first layer, where attention is spread, to few in the last.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PyramidKv {
    /// `C`: tokens a layer on average, the window's among them. More than the window.
    pub capacity: u32,
    /// `w`: newest tokens, which every layer keeps. Default 8.
    pub window: u32,
    /// How steep: the last layer gets `(C - w) / beta` beside the window. At least 1, which is flat; default 20.
    pub beta: f64,
}

setters!(PyramidKv { capacity: u32, window: u32, beta: f64 });

impl PyramidKv {
    /// `capacity` tokens a layer, with the defaults of the paper's code.
    pub fn new(capacity: u32) -> PyramidKv {
        PyramidKv { capacity, window: 8, beta: 20.0 }
    }

    /// The budget of each of `layers`, before it is rounded: `min = (C - w) / beta`, `max = 2 (C - w) - min`,
    /// `step = (max - min) / (layers - 1)`, layer `l` gets `max - l step + w`. Their mean is `C`; a single layer gets `C`.
    ///
    /// # Errors
    /// A capacity that is not above the window, a beta below 1, no layers.
    pub fn shares(&self, layers: u32) -> Result<Vec<f64>, SelectError> {
        self.shares_of(layers, u32::MAX)
    }

    /// [`PyramidKv::shares`] of a prompt of `tokens`, of which no layer gets more: as in the paper's code, `max` is then `tokens - w`,
    /// and `min` what `max` lost more, so that the mean stays `C`.
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

    /// The budgets in whole tokens, for prompts that no budget passes. Their sum is exactly `layers * capacity`: each share is rounded
    /// down, and the largest remainders get what is left, of equal ones the lower layer. None is below the window.
    ///
    /// The first layers get up to twice the capacity: of a prompt shorter than that they keep fewer tokens than they may, and all
    /// layers together fewer than were asked for. Where the prompt is known, [`PyramidKv::budgets_of`] gives those to the later layers.
    ///
    /// # Errors
    /// Those of [`PyramidKv::shares`].
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::codec::PyramidKv;
    /// let budgets = PyramidKv::new(108).budgets(4)?;
    /// assert_eq!(budgets, [203, 140, 76, 13]);
    /// # Ok::<(), pikv::codec::SelectError>(())
    /// ```
    pub fn budgets(&self, layers: u32) -> Result<Vec<u32>, SelectError> {
        self.budgets_of(layers, u32::MAX)
    }

    /// The budgets in whole tokens for a prompt of `tokens`, of which none is more. Their sum is exactly `layers * capacity`, or
    /// `layers * tokens` if the prompt is no longer than the capacity: what the first layers cannot use the later ones get, evenly
    /// less from layer to layer, as in the paper's code.
    ///
    /// # Errors
    /// Those of [`PyramidKv::shares`].
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::codec::PyramidKv;
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
        // A share that rounding put a hair above a whole number may have been given too much: take that from the smallest remainders.
        for at in order.iter().take(total.saturating_sub(given) as usize) {
            budgets[*at] += 1;
        }
        for at in order.iter().rev().take(given.saturating_sub(total) as usize) {
            budgets[*at] -= 1;
        }
        Ok(budgets)
    }

    /// Which of the tokens of `layer` stay, oldest first, by their `scores`: the newest `window`, and of the others the best up to the
    /// layer's budget for a prompt of so many tokens ([`PyramidKv::budgets_of`]). Of equal scores the older stays. O(n log n).
    ///
    /// # Errors
    /// Those of [`PyramidKv::shares`], a layer that is not there, scores that are not finite.
    pub fn keep(&self, layer: u32, layers: u32, scores: &[f32]) -> Result<Vec<bool>, SelectError> {
        let tokens = u32::try_from(scores.len()).unwrap_or(u32::MAX);
        let budgets = self.budgets_of(layers, tokens)?;
        let Some(budget) = budgets.get(layer as usize) else {
            return Err(SelectError::Layer { layer, layers });
        };
        check(scores)?;
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
