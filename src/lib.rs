//! A KV cache for authors of LLM inference engines: it stores keys and values within a byte budget, and computes attention over them,
//! for dense and Mixture-of-Experts models.
//!
#![doc = include_str!("../docs/picture.svg")]
//!
//! ```
//! use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape};
//!
//! let layer = LayerShape::new(2, 8, 64, Dtype::Bf16);
//! let cache = Cache::new(CacheConfig::new(vec![layer; 4], 256 << 20))?; // 4 layers, at most 256 MiB of pages
//! let mut sequence = cache.sequence();
//!
//! let (k, v, q, mut out) = ([0.1; 2 * 64], [0.2; 2 * 64], [0.3; 8 * 64], [0.0; 8 * 64]);
//! let mut step = cache.begin([(&mut sequence, 1)])?;                    // adds 1 token
//! for layer in 0..4 {
//!     step.append(layer, &k, &v)?;                                      // [tokens][kv_heads][dim]
//!     step.attend(layer, &q, &Attend::new(0.125), AttendOutput::new(&mut out))?; // [tokens][query_heads][dim]
//! }
//! step.commit()?;
//! # Ok::<(), pikv::Error>(())
//! ```
//!
//! # Where to start
//!
//! | you want to | item | guide |
//! |---|---|---|
//! | store, attend, roll back, fork | [`Cache`], [`Step`], [`Sequence`] | [tour](guide::tour), [serving](guide::serving) |
//! | describe a model | [`CacheConfig`], [`LayerShape`], [`Rope`], [`Attend`] | [models](guide::models), [concepts](guide::concepts) |
//! | compress older tokens | [`CacheConfig::compress`], [`codec`] | [codecs](guide::codecs) |
//! | evict, or read only some pages | [`CacheConfig::evict`], [`policy`], [`ReadPages`] | [eviction](guide::eviction) |
//! | rank experts by load and misses | [`router`], [`ClosedLoop`] | [routing](guide::routing), [closed loop](guide::closed_loop) |
//! | forecast bytes and time | [`planner`] | [planning](guide::planning) |
//! | use host memory and files | [`tiers`] | [tiers](guide::tiers) |
//! | use threads, processes, several devices | [`fabric`] | [several machines](guide::several_machines) |
//! | use a CUDA device | [`Backend`] | [CUDA](guide::cuda) |
//! | find cached prefixes | [`prefix`] | [serving](guide::serving) |
//! | monitor a cache | [`metrics`], [`StepReport`], [`report`], [`Sequence::map`] | [closed loop](guide::closed_loop) |
//!
//! [Costs](guide::costs) and the [glossary](guide::glossary) apply to all parts; [performance](guide::performance) and
//! [quality](guide::quality) have measured figures.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `rayon` | yes | attention on the threads of the caller's rayon pool; without it on the calling thread |
//! | `cuda` | no | the CUDA back end; its build needs the variable `CUDA_LIBRARY_PATH`, see [CUDA](guide::cuda) |
//! | `fit` | no | `codec::Fitter` and others: fit maps to a model's keys and values, and store them in a file |
//! | `plan` | no | `planner::flexgen`: place pages in tiers by a linear program |
//! | `metrics` | no | `metrics::MetricsSink` for the crate `metrics` |
//! | `tracing` | no | `metrics::TracingSink` for the crate `tracing`, and spans and events of each call (target `pikv`, level debug) |
//!
//! Ranks in processes over MPI are in the crate `pikv-mpi`, whose build needs an MPI and libclang.
//!
//! # Promises
//!
//! * Everything is `Send + Sync`. No state is global; no thread pool or logger is installed.
//! * A call that returns an error changes nothing, or only what dropping the step undoes: see [`Error`].
//! * Outputs are equal bit for bit for any threads, SIMD instructions, shards, tiers and splits: see
//!   [concepts](guide::concepts).
//! * The CUDA side has run over a stand-in for the driver only, on no GPU.
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod guide;

pub use pikv_core::{
    dtype::Dtype,
    page::{Layout, Position},
    plan::LayerShape,
    rope::Rope,
};
pub use pikv_host::{
    Attend, AttendOutput, Backend, Cache, CacheConfig, ClosedLoop, ConfigError, Error, ReadPages, Rows,
    Scalar, Sequence, SequenceOptions, Step, StepReport, closed_loop, codec, cuda, fabric, lanes, metrics,
    planner, policy, prefix, report, router, rules, save, shape, shard, tiers, trace,
};

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
