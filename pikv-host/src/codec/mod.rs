//! Compression: codings and maps for packed pages, and rules that select channels or codings. Rules that select tokens are in
//! [`policy`](crate::policy).
//!
//! A [`Map`] is the linear part of a coding: it maps a head's row of `wide` channels to the `narrow` channels that are stored.
//! Where keys are read as they are stored, attention runs at the narrow width: the query is folded ([`Map::fold`]) and the keys
//! are not widened. The other rows of the table average tokens, or select a coding for each head.
//!
//! | id | function | needs `fit` |
//! |---|---|---|
//! | C_SVD | `svd` | yes |
//! | C_Lo | [`lora`]; `Fitted::load_peft` | to load an adapter |
//! | C_Lo+ | [`lora_plus`], `fit_lora_plus` | to fit |
//! | C_Py | in [`policy`](crate::policy): [`PyramidKv`](crate::policy::PyramidKv) | no |
//! | C_Py-lit | [`Coding::means`]; [`pyramid`] | no |
//! | C_Ch | in `policy`: [`Chunks`](crate::policy::Chunks), [`ChunkKv`](crate::policy::ChunkKv) | no |
//! | C_Ch-lit | [`Coding::block_pca`], [`block_basis`]; `block_pca` | the last |
//! | C_F | in `policy`: [`fast_v`](crate::policy::fast_v), [`FastV`](crate::policy::FastV) | no |
//! | C_F-lit | [`crop`] | no |
//! | C_Pr | [`think`] | no |
//! | C_Dis | `distil` | yes |
//! | C_Hy | [`hybrid`]; by age [`CacheConfig::age`](crate::CacheConfig::age) | no |
//!
//! Names and ids are those of arXiv 2508.06526; the methods are those of their own papers, named in each file. With the
//! feature `fit`, a `Fitter` gathers the statistics that the fits need from a model's own keys and values, and `Fitted` keeps
//! fitted maps in one safetensors file.

mod c_ch_lit;
mod c_f_lit;
mod c_hy;
mod c_lo;
mod c_lo_plus;
mod c_pr;
mod c_py_lit;
mod coding;
mod error;
mod jacobi;
mod map;
mod moments;
mod pairs;

// The items in these modules repeat `cfg(feature = "fit")`, because rustdoc of pikv shows the feature at items and ignores it at modules.
#[cfg(feature = "fit")]
mod c_dis;
#[cfg(feature = "fit")]
mod c_svd;
#[cfg(feature = "fit")]
mod eigen;
#[cfg(feature = "fit")]
mod fit;
#[cfg(feature = "fit")]
mod fitted;
#[cfg(feature = "fit")]
mod peft;
#[cfg(feature = "fit")]
mod student;

pub use c_ch_lit::{BlockBasis, block_basis};
pub use c_f_lit::{CropBy, crop};
pub use c_hy::{Cost, HeadCodings, Hybrid, hybrid};
pub use c_lo::lora;
pub use c_lo_plus::lora_plus;
pub use c_pr::think;
pub use c_py_lit::{Pyramid, pyramid};
pub use coding::{Codec, Coding, Limits};
pub(crate) use coding::{HeadCodec, Old, Unpackable};
pub use error::{FitError, MapError, SelectError};
pub use map::Map;
pub use moments::Moments;
pub use pairs::Crop;
pub use pikv_core::codec::{
    code::Code,
    packed::{Packed, Side as PackedSide},
};

#[cfg(feature = "fit")]
pub use c_ch_lit::{BlockPca, block_pca};
#[cfg(feature = "fit")]
pub use c_dis::{Distil, Distilled, Measured, distil};
#[cfg(feature = "fit")]
pub use c_lo_plus::fit_lora_plus;
#[cfg(feature = "fit")]
pub use c_svd::svd;
#[cfg(feature = "fit")]
pub use eigen::LowRank;
#[cfg(feature = "fit")]
pub use fit::{FitShape, Fitter, Segment};
#[cfg(feature = "fit")]
pub use fitted::{Fitted, FittedError, FittedSide, fingerprint};
#[cfg(feature = "fit")]
pub use peft::{PeftConfig, PeftUse};
