//! Options of a call of attention, and where its results are written.

use crate::base::error::Error;
use crate::base::host_slice::{HostSliceMut, Scalar};
use crate::base::ids::PageId;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;

/// Options of attention: the scale, a cap of the logits, and which pages are read.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Read};
///
/// let llama = Attend::new(128f32.powf(-0.5));                   // 1 / sqrt(head_dim)
/// let gemma = Attend::new(256f32.powf(-0.5)).softcap(50.0);
/// let sparse = llama.read(Read::Quest { pages: 16 });           // the 16 most promising full pages of each KV head
/// assert_eq!((llama.read, sparse.scale), (Read::All, llama.scale));
/// # let _ = gemma;
/// ```
///
/// What is read is a *forest*: for each run of pages (sinks, each expert, ring) a fixed tree over its blocks of 8 pages, and a fixed tree
/// over the runs. Which thread computes a block, and how blocks are grouped into tasks, does not change the result.
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
    /// Which of the pages that left the ring a row reads.
    pub read: Read,
    /// Sinks are seen as near as they would be if the tokens between them and the oldest one that is still held had never been:
    /// StreamingLLM's positions inside the cache (arXiv 2309.17453). Needs keys stored before their rotation.
    pub closed_gaps: bool,
}

/// Which of the pages that left the ring a row reads. Sinks and ring are always read.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output, Read};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(32).bounds(true))?;
/// let mut sequence = cache.sequence();
/// let mut out = [0.0; 512 * 2 * 4];
/// for n in [512, 1] {
///     let mut step = cache.begin([(&mut sequence, n)])?;
///     let n = n as usize;
///     step.append(0, &[0.5; 512 * 4][..n * 4], &[0.25; 512 * 4][..n * 4])?;
///     let attend = Attend::new(0.5).read(Read::Quest { pages: 2 });
///     step.attend(0, &[1.0; 512 * 8][..n * 8], &attend, Output::new(&mut out[..n * 8]))?;
///     step.commit()?;
/// }
/// assert!(out[..8].iter().all(|x| (x - 0.25).abs() < 1e-6));
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Read {
    /// All: the result is that of attention over everything that is held.
    #[default]
    All,
    /// Those of the experts that the row was routed to, by their home expert. The row's [`route`](crate::Step::route) must
    /// come first. Each row is then attended for itself.
    Experts,
    /// So many full pages of each KV head, those whose scores could be highest (Quest, arXiv 2406.10774), and each expert's
    /// newest page. Needs [`CacheConfig::bounds`](crate::CacheConfig::bounds). The paper reads everything in the first two
    /// layers. Of a KV head the query heads read the same pages; each row is attended for itself. Where a codec packed a page, the
    /// bounds are those of the keys before.
    Quest {
        /// Full pages.
        pages: u32,
    },
}

/// Capped logits stay below what the scores can be.
const MAX_SOFTCAP: f32 = 8_388_608.0;

impl Attend {
    /// Attention with factor `scale`.
    pub const fn new(scale: f32) -> Attend {
        Attend { scale, softcap: None, split: None, read: Read::All, closed_gaps: false }
    }

    /// Sets the cap of the logits.
    pub const fn softcap(mut self, cap: f32) -> Attend {
        self.softcap = Some(cap);
        self
    }

    /// Sets which pages are read.
    pub const fn read(mut self, read: Read) -> Attend {
        self.read = read;
        self
    }

    /// Sets whether sinks are seen across what was evicted.
    pub const fn closed_gaps(mut self, on: bool) -> Attend {
        self.closed_gaps = on;
        self
    }

    /// Sets the blocks of a task.
    pub const fn split(mut self, blocks: u32) -> Attend {
        self.split = Some(blocks);
        self
    }

    /// The factor of `q . k`: to base 2, or to the unit of the cap.
    ///
    /// # Errors
    /// What of the options is out of range, or does not go with the layer; `bounds` says whether the cache keeps those of pages.
    pub(crate) fn check(&self, layer: usize, shape: &LayerShape, bounds: bool) -> Result<f32, Error> {
        let Attend { scale, softcap, split, read, closed_gaps } = *self;
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
        if matches!(read, Read::Quest { .. }) && !bounds {
            return Err(Error::NoBounds);
        }
        if closed_gaps && shape.rope.is_none() {
            return Err(Error::NoRotation { layer });
        }
        Ok(factor)
    }
}

/// Where results of attention go: the output, and if wanted log-sum-exps and the weight of every token.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20))?;
/// let mut sequence = cache.sequence();
/// let (mut out, mut lse, mut mass) = ([0.0; 3 * 2 * 4], [0.0; 3 * 2], Vec::new());
/// let mut step = cache.begin([(&mut sequence, 3)])?;
/// step.append(0, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
/// step.attend(0, &[0.0; 3 * 8], &Attend::new(0.5), Output::new(&mut out).lse(&mut lse).mass(&mut mass))?;
/// step.commit()?;
/// assert!((lse[5] - 3f32.ln()).abs() < 1e-6);            // the last row weighs 3 tokens alike
/// assert!((mass[0].total() - 6.0).abs() < 1e-5);         // 3 rows of 2 query heads
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Debug)]
pub struct Output<'a> {
    pub(crate) out: HostSliceMut<'a>,
    pub(crate) lse: Option<&'a mut [f32]>,
    pub(crate) mass: Option<&'a mut Vec<PageMass>>,
}

impl<'a> Output<'a> {
    /// Attention output, `[rows][query_heads][v_dim]`, in f32, or rounded to nearest even in f16 or bf16 ([`Scalar`]). A row that sees
    /// nothing gets zeros.
    pub fn new(out: &'a mut [impl Scalar]) -> Output<'a> {
        Output { out: HostSliceMut::of(out), lse: None, mass: None }
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
#[non_exhaustive]
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
