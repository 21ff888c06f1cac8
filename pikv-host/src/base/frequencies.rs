//! Scaled RoPE frequencies, from `rope_scaling` in a model's `config.json`.

use pikv_core::page::MAX_DIM;
use std::f64::consts::TAU;
use std::sync::Arc;
use thiserror::Error;

/// Angles by which pairs of channels rotate, and a factor on rotated channels: the result of a model's `rope_scaling`.
///
/// For [`CacheConfig::frequencies`](crate::CacheConfig::frequencies), in layers with keys stored before RoPE
/// ([`LayerShape::rope`](pikv_core::plan::LayerShape::rope)). Pair `i` rotates by `inverse[i]` radians per position; rotated channels of
/// queries and keys are multiplied by `factor`, the attention factor of YaRN and LongRoPE.
///
/// The formulas are those of the configurations in Hugging Face's transformers, in f64.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::shape::{Frequencies, Scaling};
/// let llama = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
/// let frequencies = Frequencies::scaled(500_000.0, 128, &llama)?;
/// assert_eq!(frequencies.inverse()[0], 1.0);                        // fast pairs turn as before
/// let last = 500_000f64.powf(-126.0 / 128.0);
/// assert!((frequencies.inverse()[63] * 8.0 / last - 1.0).abs() < 1e-12);  // slow ones by an eighth
/// # Ok::<(), pikv::shape::FrequencyError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Frequencies {
    inverse: Arc<[f64]>,
    factor: f64,
}

/// The kinds of `rope_type` in a model's `config.json`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Scaling {
    /// `linear`: all pairs rotate by `1 / factor` of the angle.
    Linear {
        /// `factor`.
        factor: f64,
    },
    /// `dynamic`: a base that grows with the length. The frequencies are those for sequences of `len` tokens. Because keys are stored
    /// before RoPE, a cache with another `len` applies its own frequencies to all keys.
    Dynamic {
        /// `factor`.
        factor: f64,
        /// `max_position_embeddings`.
        original: u32,
        /// Tokens of the longest sequence.
        len: u32,
    },
    /// `llama3`: frequency bands, in Llama 3.1 and later.
    Llama3 {
        /// `factor`.
        factor: f64,
        /// `low_freq_factor`.
        low: f64,
        /// `high_freq_factor`.
        high: f64,
        /// `original_max_position_embeddings`.
        original: u32,
    },
    /// `yarn` (arXiv 2309.00071), in Qwen, DeepSeek and gpt-oss.
    Yarn {
        /// `factor`.
        factor: f64,
        /// `original_max_position_embeddings`.
        original: u32,
        /// `beta_fast`, usually 32.
        fast: f64,
        /// `beta_slow`, usually 1.
        slow: f64,
        /// `truncate`: whether the ramp starts and ends at whole pairs; `true` except for gpt-oss.
        truncate: bool,
        /// `attention_factor`; `None` is `0.1 ln(factor) + 1`. DeepSeek's is [`Scaling::mscale`] of `mscale` divided by that of
        /// `mscale_all_dim`.
        attention: Option<f64>,
    },
    /// `longrope` (arXiv 2402.13753), in Phi: a factor for each pair.
    LongRope {
        /// `short_factor`, or `long_factor` for sequences longer than `original`.
        factors: Vec<f64>,
        /// `max_position_embeddings / original_max_position_embeddings`, or `factor` if it is given.
        factor: f64,
        /// `original_max_position_embeddings`.
        original: u32,
        /// `attention_factor`; `None` is `sqrt(1 + ln(factor) / ln(original))`.
        attention: Option<f64>,
    },
    /// `proportional`, in Gemma 4's global layers: only a share of the pairs of a head with `rotary_dim` channels rotates, by the angles of
    /// RoPE over all of them.
    Proportional {
        /// `partial_rotary_factor`, in 0..=1.
        share: f64,
        /// `factor`, 1 if it is missing.
        factor: f64,
    },
}

impl Scaling {
    /// YaRN's `get_mscale`: `0.1 scale ln(factor) + 1`, and 1 for a factor of 1 or less.
    pub fn mscale(factor: f64, scale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * scale * libm::log(factor) + 1.0 }
    }
}

/// Invalid frequencies or scaling.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum FrequencyError {
    /// A number is out of range.
    #[error("{name} is {value}; it must be {range}")]
    Value {
        /// Name of the number.
        name: &'static str,
        /// Value given.
        value: f64,
        /// Accepted values.
        range: &'static str,
    },
    /// The number of factors is not that of the pairs.
    #[error("{got} factors for {pairs} pairs of channels; one for each is needed")]
    Count {
        /// Factors given.
        got: usize,
        /// Pairs of channels.
        pairs: usize,
    },
}

/// `value` if it is in `range`.
fn within(name: &'static str, value: f64, ok: bool, range: &'static str) -> Result<f64, FrequencyError> {
    if ok && value.is_finite() { Ok(value) } else { Err(FrequencyError::Value { name, value, range }) }
}

fn at_least_1(name: &'static str, value: f64) -> Result<f64, FrequencyError> {
    within(name, value, value >= 1.0, "finite and at least 1")
}

fn positive(name: &'static str, value: f64) -> Result<f64, FrequencyError> {
    within(name, value, value > 0.0, "finite and above 0")
}

impl Frequencies {
    /// Angles in radians per position for each pair, and the factor on rotated channels.
    ///
    /// # Errors
    /// [`FrequencyError::Value`] for an angle outside 0..=2 pi, or a factor outside 2^-10..=2^10.
    pub fn new(inverse: &[f64], factor: f64) -> Result<Frequencies, FrequencyError> {
        for angle in inverse {
            within("an angle", *angle, (0.0..=TAU).contains(angle), "in 0..=2 pi")?;
        }
        let range = (1.0 / 1024.0..=1024.0).contains(&factor);
        within("the factor on turned channels", factor, range, "in 2^-10..=2^10")?;
        Ok(Frequencies { inverse: inverse.into(), factor })
    }

    /// RoPE without scaling: pair `i` of `rotary_dim / 2` rotates by `theta^(-2 i / rotary_dim)`.
    ///
    /// # Errors
    /// [`FrequencyError::Value`] for a base below 1, or more than 256 channels.
    pub fn plain(theta: f64, rotary_dim: u32) -> Result<Frequencies, FrequencyError> {
        at_least_1("theta", theta)?;
        within("rotary_dim", f64::from(rotary_dim), rotary_dim <= MAX_DIM, "at most 256")?;
        let inverse: Vec<f64> = (0..rotary_dim / 2).map(|i| turn(theta, rotary_dim, i)).collect();
        Frequencies::new(&inverse, 1.0)
    }

    /// RoPE with base `theta` (`rope_theta`) over `rotary_dim` channels, scaled.
    ///
    /// # Errors
    /// [`FrequencyError::Value`] for a number out of range; [`FrequencyError::Count`] if LongRoPE does not have `rotary_dim / 2` factors.
    pub fn scaled(theta: f64, rotary_dim: u32, scaling: &Scaling) -> Result<Frequencies, FrequencyError> {
        let plain = Frequencies::plain(theta, rotary_dim)?;
        let each = |f: &dyn Fn(usize, f64) -> f64, factor| {
            let inverse: Vec<f64> = plain.inverse.iter().enumerate().map(|(i, x)| f(i, *x)).collect();
            Frequencies::new(&inverse, factor)
        };
        match *scaling {
            Scaling::Linear { factor } => {
                at_least_1("factor", factor)?;
                each(&|_, x| x / factor, 1.0)
            }
            Scaling::Dynamic { factor, original, len } => {
                at_least_1("factor", factor)?;
                let original = at_least_1("original", f64::from(original))?;
                let dim = within("rotary_dim", f64::from(rotary_dim), rotary_dim > 2, "above 2")?;
                let grown = factor * f64::from(len).max(original) / original - (factor - 1.0);
                Frequencies::plain(theta * libm::pow(grown, dim / (dim - 2.0)), rotary_dim)
            }
            Scaling::Llama3 { factor, low, high, original } => {
                at_least_1("factor", factor)?;
                positive("low", low)?;
                within("high", high, high > low, "above low")?;
                let original = at_least_1("original", f64::from(original))?;
                each(&|_, x| banded(x, factor, (low, high), original), 1.0)
            }
            Scaling::Yarn { factor, original, fast, slow, truncate, attention } => {
                at_least_1("factor", factor)?;
                positive("slow", slow)?;
                within("fast", fast, fast > slow, "above slow")?;
                within("theta", theta, theta > 1.0, "above 1")?;
                let original = at_least_1("original", f64::from(original))?;
                let dim = f64::from(rotary_dim);
                let ramp = Ramp::new(dim, theta, original, (fast, slow), truncate);
                let keep = |i| 1.0 - ramp.at(i);
                let factor_of = attention.unwrap_or_else(|| Scaling::mscale(factor, 1.0));
                each(&|i, x| x / factor * (1.0 - keep(i)) + x * keep(i), factor_of)
            }
            Scaling::LongRope { ref factors, factor, original, attention } => {
                let pairs = plain.inverse.len();
                if factors.len() != pairs {
                    return Err(FrequencyError::Count { got: factors.len(), pairs });
                }
                factors.iter().try_for_each(|x| positive("a factor of a pair", *x).map(|_| ()))?;
                positive("factor", factor)?;
                let original = within("original", f64::from(original), original > 1, "above 1")?;
                let grown = libm::sqrt(1.0 + libm::log(factor) / libm::log(original));
                let grown = if factor <= 1.0 { 1.0 } else { grown };
                each(&|i, x| x / factors[i], attention.unwrap_or(grown))
            }
            Scaling::Proportional { share, factor } => {
                within("share", share, (0.0..=1.0).contains(&share), "in 0..=1")?;
                at_least_1("factor", factor)?;
                let turned = (share * f64::from(rotary_dim) / 2.0) as usize;
                each(&|i, x| if i < turned { x / factor } else { 0.0 }, 1.0)
            }
        }
    }

    /// Radians per position for each pair.
    pub fn inverse(&self) -> &[f64] {
        &self.inverse
    }

    /// Factor on rotated channels of queries and keys.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Factor by which products of rotated channels exceed those before RoPE; rounded up unless it is 1.
    pub(crate) fn stretch(&self) -> f32 {
        let square = (self.factor * self.factor) as f32;
        if self.factor == 1.0 { 1.0 } else { square * (1.0 + f32::EPSILON) }
    }
}

/// Angle of pair `i` per position without scaling.
pub(crate) fn turn(theta: f64, rotary_dim: u32, i: u32) -> f64 {
    libm::pow(theta, -2.0 * f64::from(i) / f64::from(rotary_dim))
}

/// Llama 3.1's bands: slow pairs rotate by `1 / factor` of the angle, fast ones by all of it, those between by an interpolation.
fn banded(angle: f64, factor: f64, (low, high): (f64, f64), original: f64) -> f64 {
    let wave = TAU / angle;
    if wave > original / low {
        angle / factor
    } else if wave < original / high {
        angle
    } else {
        let smooth = (original / wave - low) / (high - low);
        (1.0 - smooth) * angle / factor + smooth * angle
    }
}

/// YaRN's ramp over the pairs, from 0 for fast ones to 1 for slow ones.
struct Ramp {
    low: f64,
    high: f64,
}

impl Ramp {
    fn new(dim: f64, theta: f64, original: f64, (fast, slow): (f64, f64), truncate: bool) -> Ramp {
        // The pair that rotates this many times over the original length.
        let pair = |turns: f64| dim * libm::log(original / (turns * TAU)) / (2.0 * libm::log(theta));
        let (mut low, mut high) = (pair(fast), pair(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        Ramp { low, high }
    }

    fn at(&self, pair: usize) -> f64 {
        ((pair as f64 - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}
