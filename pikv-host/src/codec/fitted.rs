//! Fitted maps in one safetensors file.

use super::{FitShape, Map, MapError};
use crate::base::files;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Value of `format` in a file's metadata.
const FORMAT: &str = "pikv fitted maps";
/// Version that is written, and the only one that is read.
const VERSION: &str = "1";

/// An error in making, writing or reading fitted maps.
#[derive(Debug, Error)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub enum FittedError {
    /// The file system failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The bytes are not a safetensors file.
    #[error("not a safetensors file, or a damaged one: {0}")]
    File(#[from] safetensors::SafeTensorError),
    /// A metadata key that is missing or has another value.
    #[error("metadata {key:?} is {found:?}; {wanted:?} is needed")]
    Metadata {
        /// The key.
        key: String,
        /// The value found; `None` for a missing key.
        found: Option<String>,
        /// Accepted value.
        wanted: String,
    },
    /// The maps were fitted to another model.
    #[error(
        "fitted to the model with fingerprint {found:?}, not to {expected:?}: fit anew, or load that model"
    )]
    Fingerprint {
        /// Fingerprint in the file.
        found: String,
        /// Fingerprint of the model that is to use them.
        expected: String,
    },
    /// The contents do not match the digest in the file.
    #[error("the file says its digest is {found}, its contents have {actual}: it is damaged")]
    Digest {
        /// Digest in the file.
        found: String,
        /// Digest of the contents.
        actual: String,
    },
    /// A tensor is missing.
    #[error("no tensor {name:?}: every layer and head needs its maps")]
    Missing {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor that belongs to no layer and head of the shape.
    #[error("tensor {name:?} belongs to no layer and head of the shape asked for")]
    Unexpected {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor of another type or shape.
    #[error("tensor {name:?} is {found}; {wanted} is needed")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Type and shape in the file.
        found: String,
        /// Accepted type and shape.
        wanted: String,
    },
    /// A map that cannot be made of its tensors.
    #[error("the maps of {head}: {source}")]
    Map {
        /// Layer, head and side of the map.
        head: String,
        /// Reason.
        source: MapError,
    },
    /// A PEFT adapter that gives no projectors.
    #[error("a PEFT adapter: {what}")]
    Peft {
        /// Reason, with the accepted values.
        what: String,
    },
    /// Neither keys nor values have maps.
    #[error("maps for keys, for values, or for both are needed")]
    Empty,
    /// A number of maps other than `layers * kv_heads`.
    #[error("{have} maps for {side}; {layers} layers of {kv_heads} KV heads need {wanted}", wanted = u64::from(*layers) * u64::from(*kv_heads))]
    Maps {
        /// `"k"` or `"v"`.
        side: &'static str,
        /// Maps given.
        have: usize,
        /// Number of layers.
        layers: u32,
        /// KV heads of a layer.
        kv_heads: u32,
    },
    /// A map whose width is not its head's.
    #[error("{head}: a map of {wide} channels; {wanted} are needed")]
    Width {
        /// Layer, head and side of the map.
        head: String,
        /// Channels of the map.
        wide: u32,
        /// Channels of the head.
        wanted: u32,
    },
}

/// The maps of all keys, or of all values.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub struct FittedSide {
    /// Id of the method that made them, such as `"C_SVD"`.
    pub method: String,
    /// `[layers][kv_heads]`.
    pub maps: Vec<Map>,
}

impl FittedSide {
    /// Maps made by the method with id `method`, `[layers][kv_heads]`.
    pub fn new(method: impl Into<String>, maps: Vec<Map>) -> FittedSide {
        FittedSide { method: method.into(), maps }
    }
}

/// The maps of every layer and KV head, with the fingerprint of the model that they were fitted to.
///
/// Needs the feature `fit`.
#[derive(Clone, Debug, PartialEq)]
#[cfg(feature = "fit")]
pub struct Fitted {
    shape: FitShape,
    fingerprint: String,
    k: Option<FittedSide>,
    v: Option<FittedSide>,
}

/// BLAKE3 of `parts`, as 64 hexadecimal digits, to identify a model. Each name and each byte string is hashed after its length, in
/// the order given, so different lists never hash the same input.
///
/// ```
/// # use pikv_host as pikv;
/// let a = pikv::codec::fingerprint(&[("config", b"{}"), ("wk", &[1, 2])]);
/// assert_ne!(a, pikv::codec::fingerprint(&[("config", b"{}"), ("wk", &[2, 1])]));
/// ```
#[cfg(feature = "fit")]
pub fn fingerprint(parts: &[(&str, &[u8])]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts.iter().flat_map(|(name, bytes)| [name.as_bytes(), bytes]) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    hasher.finalize().to_hex().to_string()
}

impl Fitted {
    /// Maps for a model of `shape` with that `fingerprint`: any string that is unique to its weights ([`fingerprint`] makes one).
    ///
    /// # Errors
    /// [`FittedError::Empty`] without maps, [`FittedError::Maps`] unless there is one for each head, [`FittedError::Width`] for a map whose
    /// width is not its head's.
    pub fn new(
        shape: FitShape,
        fingerprint: &str,
        k: Option<FittedSide>,
        v: Option<FittedSide>,
    ) -> Result<Fitted, FittedError> {
        let fitted = Fitted { shape, fingerprint: fingerprint.to_owned(), k, v };
        for (side, maps, wanted) in fitted.sides() {
            let FitShape { layers, kv_heads, .. } = shape;
            if maps.maps.len() as u64 != u64::from(layers) * u64::from(kv_heads) {
                return Err(FittedError::Maps { side, have: maps.maps.len(), layers, kv_heads });
            }
            for (at, map) in maps.maps.iter().enumerate() {
                if map.wide() != wanted {
                    let head = head(at, kv_heads, side);
                    return Err(FittedError::Width { head, wide: map.wide(), wanted });
                }
            }
        }
        if fitted.sides().next().is_none() { Err(FittedError::Empty) } else { Ok(fitted) }
    }

    /// The maps of the keys, if there are any.
    pub fn k(&self) -> Option<&FittedSide> {
        self.k.as_ref()
    }

    /// The maps of the values, if there are any.
    pub fn v(&self) -> Option<&FittedSide> {
        self.v.as_ref()
    }

    /// Number and widths of the layers and heads.
    pub fn shape(&self) -> FitShape {
        self.shape
    }

    /// The model's fingerprint.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The file as bytes: for each layer and head f32 tensors `layers.{l}.heads.{h}.{k|v}.{encode|decode|bias}`; in the metadata `format`,
    /// `version`, `fingerprint`, `digest`, and for each side `{k|v}.method` and `{k|v}.ranks`, separated by commas.
    ///
    /// # Errors
    /// [`FittedError::File`] if safetensors cannot serialise them.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FittedError> {
        let mut tensors = BTreeMap::new();
        let mut metadata = BTreeMap::from(
            [("format", FORMAT), ("version", VERSION), ("fingerprint", &self.fingerprint)]
                .map(|(k, v)| (k.to_owned(), v.to_owned())),
        );
        for (side, maps, _) in self.sides() {
            let ranks: Vec<String> = maps.maps.iter().map(|m| m.narrow().to_string()).collect();
            metadata.insert(format!("{side}.method"), maps.method.clone());
            metadata.insert(format!("{side}.ranks"), ranks.join(","));
            for (at, map) in maps.maps.iter().enumerate() {
                let head = head(at, self.shape.kv_heads, side);
                let (wide, narrow) = (map.wide() as usize, map.narrow() as usize);
                let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
                tensors.insert(format!("{head}.encode"), (vec![narrow, wide], bytes(&map.encode())));
                tensors.insert(format!("{head}.decode"), (vec![wide, narrow], bytes(&map.decode())));
                if let Some(bias) = map.bias() {
                    tensors.insert(format!("{head}.bias"), (vec![wide], bytes(bias)));
                }
            }
        }
        let views = tensors
            .iter()
            .map(|(name, (shape, bytes))| {
                Ok((name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes)?))
            })
            .collect::<Result<BTreeMap<_, _>, FittedError>>()?;
        metadata.insert("digest".to_owned(), digest(&metadata, &views));
        Ok(safetensors::serialize(views, Some(metadata.into_iter().collect()))?)
    }

    /// Reads and checks the bytes of [`Fitted::to_bytes`].
    ///
    /// # Errors
    /// Bytes that are not such a file, have another version or are damaged ([`FittedError::Digest`]); a fingerprint other than `expected`;
    /// layers or heads of `shape` that are missing, or others that are present.
    pub fn from_bytes(bytes: &[u8], expected: &str, shape: FitShape) -> Result<Fitted, FittedError> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let file = SafeTensors::deserialize(bytes)?;
        let metadata: BTreeMap<String, String> =
            header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        let get = |key: &str, wanted: &str| {
            let absent =
                || FittedError::Metadata { key: key.to_owned(), found: None, wanted: wanted.to_owned() };
            metadata.get(key).ok_or_else(absent)
        };
        for (key, wanted) in [("format", FORMAT), ("version", VERSION)] {
            let found = get(key, wanted)?;
            if found != wanted {
                let (key, found, wanted) = (key.to_owned(), Some(found.clone()), wanted.to_owned());
                return Err(FittedError::Metadata { key, found, wanted });
            }
        }
        let found = get("fingerprint", expected)?;
        if found != expected {
            return Err(FittedError::Fingerprint { found: found.clone(), expected: expected.to_owned() });
        }
        let views: BTreeMap<&str, TensorView<'_>> = file.iter().collect();
        let (found, actual) = (get("digest", "that of the contents")?, digest(&metadata, &views));
        if *found != actual {
            return Err(FittedError::Digest { found: found.clone(), actual });
        }
        let mut left = views;
        let mut side = |side: &'static str, wide| -> Result<Option<FittedSide>, FittedError> {
            let Some(method) = metadata.get(&format!("{side}.method")) else { return Ok(None) };
            let heads = shape.layers as usize * shape.kv_heads as usize;
            let maps = (0..heads).map(|at| take(&mut left, head(at, shape.kv_heads, side), wide));
            let maps: Vec<Map> = maps.collect::<Result<_, _>>()?;
            let ranks: Vec<String> = maps.iter().map(|m| m.narrow().to_string()).collect();
            let (key, wanted) = (format!("{side}.ranks"), ranks.join(","));
            let found = get(&key, &wanted)?;
            if *found != wanted {
                return Err(FittedError::Metadata { key, found: Some(found.clone()), wanted });
            }
            Ok(Some(FittedSide { method: method.clone(), maps }))
        };
        let (k, v) = (side("k", shape.k_dim)?, side("v", shape.v_dim)?);
        if let Some(name) = left.into_keys().next() {
            return Err(FittedError::Unexpected { name: name.to_owned() });
        }
        Fitted::new(shape, expected, k, v)
    }

    /// Writes the file under a random name beside `path`, syncs it, and renames it to `path`. On an error the file at `path` is unchanged.
    /// Removes partial files (`NAME.0123456789abcdef.part`) of earlier saves that were killed.
    ///
    /// A file that replaces another takes its permissions; a new one gets the process's default. The file holds maps, which are statistics
    /// of the calibration run, and no tokens.
    ///
    /// # Errors
    /// [`FittedError::Io`] for an error of the file system, a path without a file name, or a file above the process's size limit
    /// (`RLIMIT_FSIZE`).
    pub fn save(&self, path: &Path) -> Result<(), FittedError> {
        let bytes = self.to_bytes()?;
        let write = |file: &mut files::Private| file.write_all(&bytes);
        files::replace(path, files::Readers::AsBefore, write)
            .map_err(|source| FittedError::Io { path: path.to_owned(), source })
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// [`FittedError::Io`], and the errors of [`Fitted::from_bytes`].
    pub fn load(path: &Path, expected: &str, shape: FitShape) -> Result<Fitted, FittedError> {
        let bytes = fs::read(path).map_err(|source| FittedError::Io { path: path.to_owned(), source })?;
        Fitted::from_bytes(&bytes, expected, shape)
    }

    /// The sides that are present, with the channels of their heads.
    fn sides<'a>(&'a self) -> impl Iterator<Item = (&'static str, &'a FittedSide, u32)> {
        let of = |name, side: &'a Option<FittedSide>, wide| side.as_ref().map(move |s| (name, s, wide));
        [of("k", &self.k, self.shape.k_dim), of("v", &self.v, self.shape.v_dim)].into_iter().flatten()
    }
}

/// Prefix of the tensor names of one side of a head.
fn head(at: usize, kv_heads: u32, side: &str) -> String {
    let (layer, head) = (at / kv_heads as usize, at % kv_heads as usize);
    format!("layers.{layer}.heads.{head}.{side}")
}

/// The digest of a file's metadata (without `digest`) and tensors.
fn digest(metadata: &BTreeMap<String, String>, tensors: &BTreeMap<&str, TensorView<'_>>) -> String {
    let shapes: Vec<String> = tensors.values().map(|t| format!("{:?} {:?}", t.dtype(), t.shape())).collect();
    let said = metadata.iter().filter(|(key, _)| *key != "digest");
    let said = said.map(|(key, value)| (key.as_str(), value.as_bytes()));
    let held = tensors
        .iter()
        .zip(&shapes)
        .flat_map(|((name, view), shape)| [(*name, shape.as_bytes()), (*name, view.data())]);
    fingerprint(&said.chain(held).collect::<Vec<_>>())
}

/// Removes the tensors of one map from `tensors` and makes the map.
fn take(tensors: &mut BTreeMap<&str, TensorView<'_>>, head: String, wide: u32) -> Result<Map, FittedError> {
    let width = wide as usize;
    let mut tensor = |part: &str, fits: &dyn Fn(&[usize]) -> bool, wanted: String| {
        let name = format!("{head}.{part}");
        let Some(view) = tensors.remove(name.as_str()) else { return Err(FittedError::Missing { name }) };
        if view.dtype() != Dtype::F32 || !fits(view.shape()) {
            let found = format!("{:?} {:?}", view.dtype(), view.shape());
            return Err(FittedError::Tensor { name, found, wanted });
        }
        let (words, _) = view.data().as_chunks::<4>();
        Ok((view.shape()[0], words.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()))
    };
    let down = |s: &[usize]| s.len() == 2 && s[1] == width && (1..=width).contains(&s[0]);
    let (rank, encode) = tensor("encode", &down, format!("F32 [1..={wide}, {wide}]"))?;
    let (_, decode) = tensor("decode", &|s| s == [width, rank], format!("F32 [{wide}, {rank}]"))?;
    let bias = match tensor("bias", &|s| s == [width], format!("F32 [{wide}]")) {
        Ok((_, bias)) => Some(bias),
        Err(FittedError::Missing { .. }) => None,
        Err(other) => return Err(other),
    };
    Map::new(wide, rank as u32, encode, decode, bias).map_err(|source| FittedError::Map { head, source })
}
