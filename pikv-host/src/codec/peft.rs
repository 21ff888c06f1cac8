//! Projectors from adapters in PEFT's layout (Hugging Face, `adapter_model.safetensors` and `adapter_config.json`).

use super::{FitShape, Fitted, FittedError, FittedSide, Map, lora};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The fields of a LoRA adapter's `adapter_config.json` that pikv reads.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub struct PeftConfig {
    /// `r`: rank of the adapter.
    pub rank: u32,
    /// `lora_alpha`.
    pub alpha: f32,
    /// `use_rslora`: the update is scaled by `alpha / sqrt(rank)`, not by `alpha / rank`.
    pub rslora: bool,
}

impl PeftConfig {
    /// An adapter of this rank and alpha, scaled by `alpha / rank`.
    pub const fn new(rank: u32, alpha: f32) -> PeftConfig {
        PeftConfig { rank, alpha, rslora: false }
    }
}

setters!(PeftConfig { rank: u32, alpha: f32, rslora: bool });

/// How an adapter becomes the projectors of heads. With its scale s, the adapter adds `s B A x` to a projection's output for `x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub enum PeftUse {
    /// For an adapter of the model's own `k_proj` and `v_proj`, whose A reads hidden states. The projector is orthogonal, to the span of
    /// the head's rows of B: the directions in which the adapter can move the head's keys or values. A and s are not used. The adapted
    /// model's keys are `W x + s B A x`, and the part of `W x` outside the span is lost, so keys are not approximated as a whole: measure
    /// the loss. Stores as many channels as B has independent columns for the head, at most the rank.
    Span,
    /// For an adapter trained to reconstruct keys (or values), whose A reads the channels of all KV heads side by side: a row is stored as
    /// `A_h x` and read as `s B_h A_h x`, with the columns of A and the rows of B of that head alone. Terms from one head to another are
    /// dropped, so an adapter that mixes heads loses them. Stores `rank` channels.
    Reconstruction,
}

impl PeftConfig {
    /// Reads the text of an `adapter_config.json`.
    ///
    /// # Errors
    /// [`FittedError::Peft`] for text that is not such a configuration; a rank of 0; an alpha that is 0 or not finite; DoRA, whose update
    /// is not a product of two matrices; ranks or alphas that differ by module.
    pub fn from_json(text: &str) -> Result<PeftConfig, FittedError> {
        let refused = |what: String| FittedError::Peft { what };
        let written: Value = serde_json::from_str(text).map_err(|error| refused(error.to_string()))?;
        let number = |key: &str| {
            let value = &written[key];
            value.as_f64().ok_or_else(|| refused(format!("{key:?} is {value}; a number is needed")))
        };
        let is = |key: &str| written[key].as_bool().unwrap_or(false);
        if is("use_dora") {
            return Err(refused(
                "use_dora is true: its update is no product of two matrices; false is needed".into(),
            ));
        }
        for key in ["rank_pattern", "alpha_pattern"] {
            if written[key].as_object().is_some_and(|pattern| !pattern.is_empty()) {
                return Err(refused(format!(
                    "{key} is not empty: one r and one lora_alpha for all modules are needed"
                )));
            }
        }
        let (r, alpha, rslora) = (number("r")?, number("lora_alpha")? as f32, is("use_rslora"));
        // A number that is not whole or not in 1..=u32::MAX becomes 0, which is refused.
        let rank = if r.fract() == 0.0 { r as u32 } else { 0 };
        PeftConfig { rank, alpha, rslora }.check()
    }

    fn check(self) -> Result<PeftConfig, FittedError> {
        let PeftConfig { rank, alpha, .. } = self;
        if rank == 0 || !alpha.is_finite() || alpha == 0.0 {
            let what =
                format!("r {rank} and lora_alpha {alpha}: r must be at least 1, lora_alpha finite and not 0");
            return Err(FittedError::Peft { what });
        }
        Ok(self)
    }

    fn scale(&self) -> f32 {
        let rank = self.rank as f32;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

impl Fitted {
    /// The projectors of an adapter in PEFT's layout (C_Lo). For each layer l it needs tensors whose names end in
    /// `layers.{l}.self_attn.{k_proj|v_proj}.lora_A.weight`, `[rank][in]`, and `lora_B.weight`, `[kv_heads * head channels][rank]`, in F32,
    /// F16 or BF16. Head h uses the rows of B (and, with [`PeftUse::Reconstruction`], the columns of A) of its own channels. Keys or values
    /// get maps if layer 0 has their tensors; tensors of other modules are ignored.
    ///
    /// `k_proj` produces keys before their rotation, so the maps of keys fit layers with a [`rope`](pikv_core::plan::LayerShape::rope).
    /// `fingerprint` is any string that is unique to the model, as in [`Fitted::new`].
    ///
    /// # Errors
    /// [`FittedError::File`] for bytes that are not a safetensors file, [`FittedError::Empty`] for tensors of neither module,
    /// [`FittedError::Missing`] for a layer without its tensors, [`FittedError::Tensor`] for another type or shape, [`FittedError::Peft`]
    /// for an invalid configuration, two tensors whose names end alike, a B that is 0 for a head (as PEFT initialises it), or values that
    /// are not finite.
    pub fn from_peft(
        bytes: &[u8],
        config: PeftConfig,
        how: PeftUse,
        shape: FitShape,
        fingerprint: &str,
    ) -> Result<Fitted, FittedError> {
        let config = config.check()?;
        let file = SafeTensors::deserialize(bytes)?;
        let side = |module: &str, channels: u32| -> Result<Option<FittedSide>, FittedError> {
            let find = |layer: u32, matrix: &str| {
                let name = format!("layers.{layer}.self_attn.{module}.lora_{matrix}.weight");
                find(&file, name)
            };
            if matches!(find(0, "B"), Err(FittedError::Missing { .. })) {
                return Ok(None);
            }
            let mut maps = Vec::new();
            for layer in 0..shape.layers {
                let (a, b) = (find(layer, "A")?, find(layer, "B")?);
                let adapter = Adapter::read(&a, &b, &config, how, shape.kv_heads, channels)?;
                for head in 0..shape.kv_heads {
                    let named = || format!("layers.{layer}.{module}, KV head {head}");
                    maps.push(adapter.map(head as usize, how).map_err(|source| match source {
                        Some(source) => FittedError::Map { head: named(), source },
                        None => FittedError::Peft {
                            what: format!("{}: lora_B is 0, as before training", named()),
                        },
                    })?);
                }
            }
            Ok(Some(FittedSide { method: "C_Lo".to_owned(), maps }))
        };
        let (k, v) = (side("k_proj", shape.k_dim)?, side("v_proj", shape.v_dim)?);
        Fitted::new(shape, fingerprint, k, v)
    }

    /// [`Fitted::from_peft`] of `adapter_model.safetensors` and `adapter_config.json` in `folder`.
    ///
    /// # Errors
    /// [`FittedError::Io`], and the errors of [`Fitted::from_peft`] and [`PeftConfig::from_json`].
    pub fn load_peft(
        folder: &Path,
        how: PeftUse,
        shape: FitShape,
        fingerprint: &str,
    ) -> Result<Fitted, FittedError> {
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read(&path).map_err(|source| FittedError::Io { path, source })
        };
        let text = String::from_utf8_lossy(&read("adapter_config.json")?).into_owned();
        let config = PeftConfig::from_json(&text)?;
        Fitted::from_peft(&read("adapter_model.safetensors")?, config, how, shape, fingerprint)
    }
}

/// A tensor and its full name, found by the end of the name.
type Found<'a> = (String, TensorView<'a>);

fn find<'a>(file: &SafeTensors<'a>, end: String) -> Result<Found<'a>, FittedError> {
    let ends = |name: &str| {
        name.strip_suffix(end.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let mut found = file.iter().filter(|(name, _)| ends(name));
    match (found.next(), found.next()) {
        (Some((name, view)), None) => Ok((name.to_owned(), view)),
        (Some((a, _)), Some((b, _))) => {
            Err(FittedError::Peft { what: format!("{a:?} and {b:?} both end with {end:?}") })
        }
        (None, _) => Err(FittedError::Missing { name: end }),
    }
}

/// Both matrices of a module's adapter.
struct Adapter {
    /// `[rank][width]`.
    a: Vec<f32>,
    width: usize,
    /// `[kv_heads * channels][rank]`.
    b: Vec<f32>,
    rank: usize,
    channels: usize,
    scale: f32,
}

impl Adapter {
    fn read(
        (a_name, a): &Found<'_>,
        (b_name, b): &Found<'_>,
        config: &PeftConfig,
        how: PeftUse,
        kv_heads: u32,
        channels: u32,
    ) -> Result<Adapter, FittedError> {
        let (rank, rows) = (config.rank as usize, kv_heads as usize * channels as usize);
        let refused = |name: &str, view: &TensorView<'_>, wanted: String| {
            let found = format!("{:?} {:?}", view.dtype(), view.shape());
            FittedError::Tensor { name: name.to_owned(), found, wanted }
        };
        let width = match (a.shape(), how) {
            ([r, width], PeftUse::Span) if *r == rank => *width,
            ([r, width], PeftUse::Reconstruction) if (*r, *width) == (rank, rows) => *width,
            (_, PeftUse::Span) => return Err(refused(a_name, a, format!("[{rank}, in]"))),
            (_, PeftUse::Reconstruction) => return Err(refused(a_name, a, format!("[{rank}, {rows}]"))),
        };
        if b.shape() != [rows, rank] {
            return Err(refused(b_name, b, format!("[{rows}, {rank}]")));
        }
        let read = |name: &str, view: &TensorView<'_>| {
            let values = values(view).ok_or_else(|| refused(name, view, "F32, F16 or BF16".to_owned()))?;
            match values.iter().position(|x| !x.is_finite()) {
                Some(i) => Err(FittedError::Peft {
                    what: format!("value {i} of {name:?} is {}; it must be finite", values[i]),
                }),
                None => Ok(values),
            }
        };
        let (a, b) = (read(a_name, a)?, read(b_name, b)?);
        Ok(Adapter { a, width, b, rank, channels: channels as usize, scale: config.scale() })
    }

    /// `Err(None)` for a B that is 0 for this head.
    fn map(&self, head: usize, how: PeftUse) -> Result<Map, Option<super::MapError>> {
        let Adapter { a, width, b, rank, channels, scale } = self;
        let b = &b[head * channels * rank..][..channels * rank];
        if b.iter().all(|x| *x == 0.0) {
            return Err(None);
        }
        let (narrow, down, up) = match how {
            PeftUse::Span => {
                let down = basis(b, *channels, *rank);
                let narrow = down.len() / channels;
                let up =
                    (0..*channels).flat_map(|c| down.iter().skip(c).step_by(*channels).copied()).collect();
                (narrow, down, up)
            }
            PeftUse::Reconstruction => {
                let down = (0..*rank).flat_map(|r| &a[r * width + head * channels..][..*channels]).copied();
                (*rank, down.collect(), b.iter().map(|x| scale * x).collect())
            }
        };
        lora(*channels as u32, narrow as u32, down, up).map_err(Some)
    }
}

fn values(view: &TensorView<'_>) -> Option<Vec<f32>> {
    let halves = |of: fn([u8; 2]) -> f32| view.data().as_chunks::<2>().0.iter().map(|x| of(*x)).collect();
    match view.dtype() {
        Dtype::F32 => Some(view.data().as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()),
        Dtype::F16 => Some(halves(|x| f16::from_le_bytes(x).to_f32())),
        Dtype::BF16 => Some(halves(|x| bf16::from_le_bytes(x).to_f32())),
        _ => None,
    }
}

/// An orthonormal basis, `[n][channels]`, of the column span of `b`, `[channels][rank]`: Gram-Schmidt in f64, next with the column of the
/// longest remainder, until no remainder exceeds 1e-5 of the longest column.
fn basis(b: &[f32], channels: usize, rank: usize) -> Vec<f32> {
    let column = |r: usize| -> Vec<f64> { (0..channels).map(|c| f64::from(b[c * rank + r])).collect() };
    let mut columns: Vec<Vec<f64>> = (0..rank).map(column).collect();
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let (mut rows, mut longest) = (Vec::new(), 0.0f64);
    for _ in 0..rank.min(channels) {
        let lengths: Vec<f64> = columns.iter().map(|x| dot(x, x).sqrt()).collect();
        let most = (0..rank).fold(0, |most, r| if lengths[r] > lengths[most] { r } else { most });
        longest = longest.max(lengths[most]);
        if lengths[most] <= 1e-5 * longest {
            break;
        }
        let unit: Vec<f64> = columns[most].iter().map(|x| x / lengths[most]).collect();
        // Twice, which removes the rounding error of the first pass.
        for _ in 0..2 {
            for x in &mut columns {
                let along = dot(x, &unit);
                x.iter_mut().zip(&unit).for_each(|(x, u)| *x -= along * u);
            }
        }
        rows.extend(unit.iter().map(|x| *x as f32));
    }
    rows
}
