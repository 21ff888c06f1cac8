//! Options of an attention call, and its outputs.

use crate::base::error::Error;
use crate::base::host_slice::{HostSliceMut, Scalar};
use crate::base::ids::PageId;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;

/// Options of attention: the scale, the softcap, and the pages that are read.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, ReadPages};
///
/// let llama = Attend::new(128f32.powf(-0.5));                   // 1 / sqrt(head_dim)
/// let gemma = Attend::new(256f32.powf(-0.5)).softcap(50.0);
/// let sparse = llama.read(ReadPages::Quest { pages: 16 });           // the 16 most promising full pages of each KV head
/// assert_eq!((llama.read, sparse.scale), (ReadPages::All, llama.scale));
/// # let _ = gemma;
/// ```
///
/// A call reads a *forest*: for each run of pages (sinks, each expert, ring) a fixed tree over its blocks of 8 pages, and a fixed tree
/// over the runs. The result does not depend on which thread computes a block or on how blocks are grouped into tasks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Attend {
    /// Factor of `q . k`, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Logits become `softcap * tanh(logit / softcap)`, as in Gemma 2, to within 1.2e-7 of the cap.
    pub softcap: Option<f32>,
    /// Blocks of 256 tokens for each task, a power of two; by default chosen from the work and the number of threads. It affects speed
    /// only.
    pub split: Option<u32>,
    /// Pages outside the ring that a row reads.
    pub read: ReadPages,
    /// Treats sinks as adjacent to the oldest other token that is still held, as if the tokens between them had never existed:
    /// StreamingLLM's positions inside the cache (arXiv 2309.17453). Needs keys stored before RoPE.
    pub closed_gaps: bool,
    /// Whether prompts may be computed with queries and weights rounded to bf16, where the processor is faster at that: [`Attend::fast`].
    pub fast: bool,
}

/// Pages outside the ring that a row reads. It always reads sinks and ring.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, ReadPages};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(32).key_bounds(true))?;
/// let mut sequence = cache.sequence();
/// let mut out = [0.0; 512 * 2 * 4];
/// for n in [512, 1] {
///     let mut step = cache.begin([(&mut sequence, n)])?;
///     let n = n as usize;
///     step.append(0, &[0.5; 512 * 4][..n * 4], &[0.25; 512 * 4][..n * 4])?;
///     let attend = Attend::new(0.5).read(ReadPages::Quest { pages: 2 });
///     step.attend(0, &[1.0; 512 * 8][..n * 8], &attend, AttendOutput::new(&mut out[..n * 8]))?;
///     step.commit()?;
/// }
/// assert!(out[..8].iter().all(|x| (x - 0.25).abs() < 1e-6));
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadPages {
    /// All pages that are held.
    #[default]
    All,
    /// Tokens in pages whose home expert is one of those that the row was routed to. Pages without such a token are not read. Call
    /// [`route`](crate::Step::route) first. Each row is attended on its own.
    Experts,
    /// For each KV head the `pages` full pages with the highest bounds on their scores (Quest, arXiv 2406.10774), and each expert's
    /// newest page. Needs [`CacheConfig::key_bounds`](crate::CacheConfig::key_bounds). The paper reads everything in the first two
    /// layers. All query heads of a KV head read the same pages; each row is attended on its own. For packed pages the bounds are those
    /// of the keys before packing.
    Quest {
        /// Full pages of each KV head.
        pages: u32,
    },
}

/// Capped logits stay below the largest score.
const MAX_SOFTCAP: f32 = 8_388_608.0;

impl Attend {
    /// Attention over all pages with factor `scale`.
    pub const fn new(scale: f32) -> Attend {
        Attend { scale, softcap: None, split: None, read: ReadPages::All, closed_gaps: false, fast: false }
    }

    /// Sets the softcap of the logits.
    pub const fn softcap(mut self, cap: f32) -> Attend {
        self.softcap = Some(cap);
        self
    }

    /// Sets the pages that are read.
    pub const fn read(mut self, read: ReadPages) -> Attend {
        self.read = read;
        self
    }

    /// Sets whether sinks are treated as adjacent to the oldest held token.
    pub const fn closed_gaps(mut self, on: bool) -> Attend {
        self.closed_gaps = on;
        self
    }

    /// Sets whether prompts may be computed with queries and weights rounded to bf16; off by default.
    ///
    /// Calls on a CPU are rounded, not those over a fabric, where full pages have K and V in bf16 and keys are stored as they are read, on lanes that
    /// [multiply bf16](pikv_lanes::Lanes::multiplies_bf16) (AVX-512 with AVX512-BF16). The rows of a KV head, one for each token and query
    /// head of a call, are taken 64 at a time; fewer than 16 that remain are exact, and so is everything else.
    ///
    /// Sums stay in f32. Beyond their rounding, an output differs from that without by at most `(2^-8 + e^(2d) - 1) v`, where `d` is `2^-8`
    /// of the largest `|q| |k| scale` of its row (Euclidean lengths), and `v` the largest magnitude of a value that the row sees in the
    /// channel. Log-sum-exps differ by at most `d`, and masses change with the weights, so a policy may decide otherwise. `docs/performance.md`
    /// has measured errors and times.
    ///
    /// The same call gives the same bits with any number of threads and any [`split`](Attend::split), with masses and without. But the
    /// bits of a prompt depend on how it is cut into steps, and may differ from those of other processors.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let cache = Cache::new(CacheConfig::new(vec![LayerShape::new(1, 1, 4, Dtype::Bf16)], 1 << 20))?;
    /// let mut sequence = cache.sequence();
    /// let mut out = [0.0; 64 * 4];
    /// let mut step = cache.begin([(&mut sequence, 64)])?;
    /// step.append(0, &[0.5; 64 * 4], &[0.25; 64 * 4])?;
    /// step.attend(0, &[0.1; 64 * 4], &Attend::new(0.5).fast(true), AttendOutput::new(&mut out))?;
    /// step.commit()?;
    /// assert!(out.iter().all(|x| (x - 0.25).abs() < 0.002));
    /// # Ok::<(), pikv::Error>(())
    /// ```
    pub const fn fast(mut self, on: bool) -> Attend {
        self.fast = on;
        self
    }

    /// Sets the blocks of each task.
    pub const fn split(mut self, blocks: u32) -> Attend {
        self.split = Some(blocks);
        self
    }

    /// Factor of `q . k` that gives logits to base 2, or in units of the softcap.
    ///
    /// # Errors
    /// An option out of range; [`Error::NoBounds`] for [`ReadPages::Quest`] unless `bounds` (the cache keeps key bounds);
    /// [`Error::NoRotation`] for closed gaps in a layer without RoPE.
    pub(crate) fn check(&self, layer: usize, shape: &LayerShape, bounds: bool) -> Result<f32, Error> {
        let Attend { scale, softcap, split, read, closed_gaps, .. } = *self;
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
        if matches!(read, ReadPages::Quest { .. }) && !bounds {
            return Err(Error::NoBounds);
        }
        if closed_gaps && shape.rope.is_none() {
            return Err(Error::NoRotation { layer });
        }
        Ok(factor)
    }
}

/// Outputs of attention: the result, and optionally log-sum-exps and the weight of every token.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20))?;
/// let mut sequence = cache.sequence();
/// let (mut out, mut lse, mut mass) = ([0.0; 3 * 2 * 4], [0.0; 3 * 2], Vec::new());
/// let mut step = cache.begin([(&mut sequence, 3)])?;
/// step.append(0, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
/// step.attend(0, &[0.0; 3 * 8], &Attend::new(0.5), AttendOutput::new(&mut out).lse(&mut lse).mass(&mut mass))?;
/// step.commit()?;
/// assert!((lse[5] - 3f32.ln()).abs() < 1e-6);            // the last row weighs 3 tokens alike
/// assert!((mass[0].total() - 6.0).abs() < 1e-5);         // 3 rows of 2 query heads
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Debug)]
pub struct AttendOutput<'a> {
    pub(crate) out: HostSliceMut<'a>,
    pub(crate) lse: Option<&'a mut [f32]>,
    pub(crate) mass: Option<&'a mut Vec<PageMass>>,
}

impl<'a> AttendOutput<'a> {
    /// Attention output, `[rows][query_heads][v_dim]`, in f32, or rounded to nearest even in f16 or bf16 ([`Scalar`]). A row that sees
    /// no token gets zeros.
    pub fn new(out: &'a mut [impl Scalar]) -> AttendOutput<'a> {
        AttendOutput { out: HostSliceMut::of(out), lse: None, mass: None }
    }

    /// Also writes the natural log-sum-exp of the scaled logits, `[rows][query_heads]`; -inf for a row that sees no token.
    pub fn lse(mut self, lse: &'a mut [f32]) -> AttendOutput<'a> {
        self.lse = Some(lse);
        self
    }

    /// Also writes the attention mass of every page read; clears `mass` first. During the call the scores take 4 bytes for each row, query
    /// head and token.
    pub fn mass(mut self, mass: &'a mut Vec<PageMass>) -> AttendOutput<'a> {
        self.mass = Some(mass);
        self
    }
}

/// Softmax weights that the tokens of one page received.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PageMass {
    /// Index of the sequence in the call.
    pub sequence: usize,
    /// KV head.
    pub kv_head: usize,
    /// Name of the page.
    pub page: PageId,
    /// For each lane the weights, summed over the query heads of the KV head, then over the rows; 0 for lanes that no row sees.
    pub tokens: [f32; LANES],
}

impl PageMass {
    /// Sum over the tokens of the page.
    pub fn total(&self) -> f32 {
        self.tokens.iter().sum()
    }
}
