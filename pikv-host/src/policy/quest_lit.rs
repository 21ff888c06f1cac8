//! QUEST-lit: a small network ranks tokens by statistics of key and value (PiKV, arXiv 2508.06526).

use super::{Candidates, Policy, Token};
use std::sync::Arc;
use thiserror::Error;

/// `u = MLP([K, V] statistics)` of the token as appended (with a rotated key if keys come rotated). The network has
/// [`QuestLit::STATISTICS`] inputs, one output, and a ReLU between layers, and serves all layers and heads. With
/// [`Eviction::by_page`](super::Eviction::by_page) a page's utility is the mean of its tokens'.
///
/// The paper publishes no weights; load trained ones here. (The method of arXiv 2406.10774 itself selects pages and evicts none:
/// [`ReadPages::Quest`](crate::attend::options::ReadPages::Quest).)
#[derive(Clone, Debug, PartialEq)]
pub struct QuestLit {
    layers: Arc<[Dense]>,
}

/// A layer of the network: `y = weight x + bias`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Dense {
    /// `[out][in]`
    pub weight: Vec<f32>,
    /// `[out]`
    pub bias: Vec<f32>,
}

impl Dense {
    /// Weights `[out][in]` and biases `[out]`.
    pub fn new(weight: Vec<f32>, bias: Vec<f32>) -> Dense {
        Dense { weight, bias }
    }
}

/// Weights that do not make a network.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QuestLitError {
    /// A network without layers.
    #[error("a network needs at least 1 layer")]
    Empty,
    /// A layer whose weights do not match its biases and inputs.
    #[error(
        "layer {layer}: {weight} weights and {bias} biases over {wide} inputs; it needs {wide} weights for each bias"
    )]
    Shape {
        /// Index of the layer.
        layer: usize,
        /// Weights given.
        weight: usize,
        /// Biases given.
        bias: usize,
        /// Outputs of the previous layer; the number of statistics for the first.
        wide: usize,
    },
    /// A last layer with other than one output.
    #[error("the network gives {outputs} numbers; a utility is 1")]
    Outputs {
        /// Outputs of the last layer.
        outputs: usize,
    },
    /// A value that is not finite.
    #[error("layer {layer}: {value} is not finite")]
    NotFinite {
        /// Index of the layer.
        layer: usize,
        /// The value.
        value: f32,
    },
    /// The bytes are not a safetensors file.
    #[cfg(feature = "fit")]
    #[error("not a safetensors file, or a damaged one: {0}")]
    File(#[from] safetensors::SafeTensorError),
    /// A tensor of another type or shape.
    #[cfg(feature = "fit")]
    #[error("tensor {name:?} is {found}; an F32 tensor of {dimensions} dimensions is needed")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Type and shape in the file.
        found: String,
        /// Accepted number of dimensions.
        dimensions: usize,
    },
}

impl QuestLit {
    /// Inputs of the network for a token: mean, minimum, maximum and Euclidean norm of its key, then of its value.
    pub const STATISTICS: usize = 8;

    /// A network of these layers, first to last.
    ///
    /// # Errors
    /// [`QuestLitError::Empty`], [`QuestLitError::Shape`] for a layer that does not match the previous one, [`QuestLitError::Outputs`] for
    /// other than one output, [`QuestLitError::NotFinite`].
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::policy::{Dense, QuestLit};
    /// // Keys of small norm are worth most, as `KeyNorm` has it.
    /// let weight = vec![0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0];
    /// QuestLit::new(vec![Dense::new(weight, vec![0.0])])?;
    /// # Ok::<(), pikv::policy::QuestLitError>(())
    /// ```
    pub fn new(layers: Vec<Dense>) -> Result<QuestLit, QuestLitError> {
        let mut wide = QuestLit::STATISTICS;
        for (layer, Dense { weight, bias }) in layers.iter().enumerate() {
            if bias.is_empty() || weight.len() != bias.len() * wide {
                let (weight, bias) = (weight.len(), bias.len());
                return Err(QuestLitError::Shape { layer, weight, bias, wide });
            }
            if let Some(&value) = weight.iter().chain(bias).find(|x| !x.is_finite()) {
                return Err(QuestLitError::NotFinite { layer, value });
            }
            wide = bias.len();
        }
        match layers.last() {
            None => Err(QuestLitError::Empty),
            Some(_) if wide != 1 => Err(QuestLitError::Outputs { outputs: wide }),
            Some(_) => Ok(QuestLit { layers: layers.into() }),
        }
    }

    /// Reads a safetensors file with tensors `layers.0.weight` `[out, in]`, `layers.0.bias` `[out]`, `layers.1.weight` and so on, all F32.
    ///
    /// # Errors
    /// Bytes that are not such a file, tensors that are missing or have another type or shape, and the errors of [`QuestLit::new`].
    #[cfg(feature = "fit")]
    pub fn from_safetensors(bytes: &[u8]) -> Result<QuestLit, QuestLitError> {
        let file = safetensors::SafeTensors::deserialize(bytes)?;
        let read = |name: String, dimensions: usize| {
            let tensor = file.tensor(&name)?;
            if tensor.dtype() != safetensors::Dtype::F32 || tensor.shape().len() != dimensions {
                let found = format!("{:?} of shape {:?}", tensor.dtype(), tensor.shape());
                return Err(QuestLitError::Tensor { name, found, dimensions });
            }
            let values = tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            Ok(values.collect::<Vec<f32>>())
        };
        let count = file.names().iter().filter(|name| name.ends_with(".weight")).count();
        let layer = |l: usize| {
            let (weight, bias) =
                (read(format!("layers.{l}.weight"), 2)?, read(format!("layers.{l}.bias"), 1)?);
            Ok(Dense { weight, bias })
        };
        QuestLit::new((0..count).map(layer).collect::<Result<_, QuestLitError>>()?)
    }

    /// The utility of a token. Sums are in f32, in the order of the inputs.
    pub fn utility(&self, key: &[f32], value: &[f32]) -> f32 {
        let mut x: Vec<f32> = [key, value].into_iter().flat_map(statistics).collect();
        for (l, Dense { weight, bias }) in self.layers.iter().enumerate() {
            let rows = weight.chunks_exact(x.len()).zip(bias);
            let row =
                |(row, bias): (&[f32], &f32)| bias + row.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>();
            let last = l + 1 == self.layers.len();
            x = rows.map(row).map(|y| if last { y } else { y.max(0.0) }).collect();
        }
        x[0]
    }
}

/// Mean, minimum, maximum and norm.
fn statistics(row: &[f32]) -> [f32; QuestLit::STATISTICS / 2] {
    let (mut sum, mut square) = (0.0, 0.0);
    let (mut least, mut most) = (f32::INFINITY, f32::NEG_INFINITY);
    for x in row {
        sum += f64::from(*x);
        square += f64::from(*x) * f64::from(*x);
        (least, most) = (least.min(*x), most.max(*x));
    }
    [(sum / row.len() as f64) as f32, least, most, square.sqrt() as f32]
}

impl Policy for QuestLit {
    fn name(&self) -> &str {
        "QUEST-lit"
    }

    fn parameters(&self, to: &mut dyn FnMut(&[u8])) {
        for Dense { weight, bias } in self.layers.iter() {
            to(bytemuck::cast_slice(weight));
            to(bytemuck::cast_slice(bias));
        }
    }

    /// State of a token: its utility, computed when it is appended.
    fn words(&self) -> usize {
        1
    }

    fn born(&self, token: &Token<'_>, state: &mut [f32]) {
        state[0] = self.utility(token.key, token.value);
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        utility.iter_mut().zip(tokens.states(0)).for_each(|(u, x)| *u = x);
    }
}
