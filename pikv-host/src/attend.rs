//! Attention over a sequence's sinks, expert pages and ring, on all shards.
//!
//! What is read is a *forest*: for each run of pages (sinks, each expert, ring) the fixed tree over its blocks, and a
//! fixed tree over the runs. A block is a leaf; which thread computes it, and how leaves are grouped into tasks, does not
//! show in the result.

use crate::backend::Kind;
use crate::cache::Inner;
use crate::error::Error;
use crate::forest::Forest;
use crate::job::{Job, Shared, View, each};
use crate::sequence::PageId;
use crate::step::length;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use std::sync::atomic::AtomicUsize;

/// Options of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Attend {
    /// Factor of `q . k`, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Logits become `softcap * tanh(logit / softcap)`, as in Gemma 2; to within 1.2e-7 of the cap.
    pub softcap: Option<f32>,
    /// Blocks of 256 tokens that a task takes, a power of two. By default chosen from the work and the threads. It bears on
    /// speed only.
    pub split: Option<u32>,
}

impl Attend {
    /// Attention with factor `scale`.
    pub const fn new(scale: f32) -> Attend {
        Attend { scale, softcap: None, split: None }
    }

    /// Sets the cap of the logits.
    pub const fn softcap(mut self, cap: f32) -> Attend {
        self.softcap = Some(cap);
        self
    }

    /// Sets the blocks of a task.
    pub const fn split(mut self, blocks: u32) -> Attend {
        self.split = Some(blocks);
        self
    }
}

/// Where results go.
#[derive(Debug)]
pub struct Output<'a> {
    out: &'a mut [f32],
    lse: Option<&'a mut [f32]>,
    mass: Option<&'a mut Vec<PageMass>>,
}

impl<'a> Output<'a> {
    /// Attention output, `[rows][query_heads][v_dim]`. A row that sees nothing gets zeros.
    pub fn new(out: &'a mut [f32]) -> Output<'a> {
        Output { out, lse: None, mass: None }
    }

    /// Also the natural log-sum-exp of the scaled logits, `[rows][query_heads]`; -inf for a row that sees nothing.
    pub fn lse(mut self, lse: &'a mut [f32]) -> Output<'a> {
        self.lse = Some(lse);
        self
    }

    /// Also the attention mass of every page read; `mass` is cleared first. The scores are kept meanwhile: 4 bytes a row, head
    /// and token.
    pub fn mass(mut self, mass: &'a mut Vec<PageMass>) -> Output<'a> {
        self.mass = Some(mass);
        self
    }
}

/// The softmax weight that the tokens of one page received.
#[derive(Clone, Debug, PartialEq)]
pub struct PageMass {
    /// Index of the sequence in the call.
    pub sequence: usize,
    /// KV head.
    pub kv_head: usize,
    /// The page.
    pub page: PageId,
    /// For each lane the weights summed over the query heads of the KV head, then over the rows; 0 for lanes not seen.
    pub tokens: [f32; LANES],
}

impl PageMass {
    /// Weight of the whole page.
    pub fn total(&self) -> f32 {
        self.tokens.iter().sum()
    }
}

/// Capped logits stay below what the scores can be.
const MAX_SOFTCAP: f32 = 8_388_608.0;

pub(crate) fn attend(
    inner: &Inner,
    layer: usize,
    shape: &LayerShape,
    views: &[View<'_>],
    q: &[f32],
    options: &Attend,
    output: Output<'_>,
) -> Result<(), Error> {
    let Attend { scale, softcap, split } = *options;
    if !(scale.is_finite() && scale > 0.0) {
        return Err(Error::Scale(scale));
    }
    if let Some(cap) = softcap.filter(|cap| !(*cap > 0.0 && *cap < MAX_SOFTCAP)) {
        return Err(Error::Softcap(cap));
    }
    if let Some(split) = split.filter(|split| !split.is_power_of_two()) {
        return Err(Error::Split(split));
    }
    let factor = softcap.map_or(scale * std::f32::consts::LOG2_E, |cap| scale / cap);
    if !(factor.is_finite() && factor > 0.0) {
        return Err(Error::Scale(scale));
    }
    let mut starts = Vec::with_capacity(views.len());
    let mut rows = 0;
    for view in views {
        starts.push(rows);
        rows += view.rows as usize;
    }
    let heads = shape.query_heads as usize;
    let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
    length("q", q.len(), rows * heads * k_dim, "rows * query_heads * k_dim")?;
    length("out", output.out.len(), rows * heads * v_dim, "rows * query_heads * v_dim")?;
    if let Some(lse) = &output.lse {
        length("lse", lse.len(), rows * heads, "rows * query_heads")?;
    }
    if let Some(at) = q.iter().position(|x| !x.is_finite()) {
        let (row, head, channel) = (at / (heads * k_dim), at / k_dim % heads, at % k_dim);
        return Err(Error::Query { layer, row, head, channel, value: q[at] });
    }
    let table = shape.rope.and_then(|rope| inner.tables.get(&rope));
    let job = Job {
        inner,
        shape,
        views,
        starts,
        q,
        factor,
        softcap: softcap.map(|cap| cap * std::f32::consts::LOG2_E),
        table,
        overflow: AtomicUsize::new(usize::MAX),
    };
    let kv_heads = shape.kv_heads as usize;
    let forests: Vec<Forest<'_>> = (0..views.len() * kv_heads)
        .filter(|i| views[i / kv_heads].rows > 0)
        .map(|i| job.forest(i / kv_heads, i % kv_heads))
        .collect();
    let mut no_lse = Vec::new();
    let lse = output.lse.unwrap_or_else(|| {
        no_lse.resize(rows * heads, 0.0);
        &mut no_lse
    });
    match (&inner.config.backend.0, output.mass) {
        (Kind::Cpu, Some(mass)) => {
            let (out, lse) = (Shared::new(output.out), Shared::new(lse));
            mass.clear();
            for pages in each(&forests, |forest| job.with_mass(forest, &out, &lse)) {
                mass.extend(pages);
            }
        }
        (Kind::Cpu, None) => job.run(&forests, split, &Shared::new(output.out), &Shared::new(lse)),
        #[cfg(feature = "cuda")]
        (Kind::Cuda(device), None) => crate::cuda::attend(device, &job, &forests, output.out, lse)?,
        #[cfg(feature = "cuda")]
        (Kind::Cuda(_), Some(_)) => {
            return Err(Error::Backend { backend: inner.config.backend.name(), what: "attention mass" });
        }
    }
    match job.overflow.into_inner() {
        usize::MAX => Ok(()),
        at => Err(Error::ScoreOverflow { layer, row: at / heads, head: at % heads, scale }),
    }
}
