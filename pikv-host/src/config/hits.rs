//! What counts as a hit.

/// What is counted as a hit, for [`CacheConfig::hits`](crate::CacheConfig::hits).
///
/// A row *wants*, of all pages of a KV head that left the ring, those with the highest bounds on its scores
/// ([`Read::Quest`](crate::attend::options::Read::Quest) reads by the same bounds), whether they are held or not; where rows read the pages of their
/// experts only, those of its experts. A wanted page that lies in the first tier is a *hit*; a page that lost some of its tokens counts by
/// the share of them that is held. A wanted page that was evicted, lies in a lower tier or on another rank of a fabric, or is of an expert
/// that is not fetched, is a *miss*. Both are counted in pages.
///
/// A page counts from the time on when none of its tokens can be taken back, looked at every 32 positions. So that pages that were evicted
/// can be wanted, the extremes of each channel of a page's keys stay when it is evicted: 4 bytes a channel of K, rounded up to 32 channels, which
/// is 3.1 % of a page in 16 bits. Those of pages that are held are kept too; [`Cache::bytes_at`](crate::Cache::bytes_at) and
/// [`Usage::ghosts`](crate::report::Usage::ghosts) count them.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::policy::{Budget, Eviction, StreamingLlm};
/// use pikv::rules::Hits;
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output, StepReport};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let config = CacheConfig::new(vec![layer], 1 << 20).ring(32).hits(Hits::new().pages(2).every(1));
/// let cache = Cache::new(config.evict(Eviction::new(StreamingLlm, Budget::Tokens(100))))?;
/// let (mut sequence, mut report) = (cache.sequence(), StepReport::default());
/// for position in 0..256 {
///     // The keys of the first 64 tokens are what every query looks for.
///     let key = if position < 64 { 1.0 } else { 0.0 };
///     let mut step = cache.begin([(&mut sequence, 1)])?;
///     step.append(0, &[key; 4], &[0.5; 4])?;
///     step.attend(0, &[1.0; 8], &Attend::new(0.5), Output::new(&mut [0.0; 8]))?;
///     step.commit_with(&mut report)?;
/// }
/// // The last row wanted two pages; the oldest tokens were evicted.
/// assert_eq!((report.hits(0), report.misses(0)), (&[0.0][..], &[2.0][..]));
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hits {
    /// Pages of each KV head that a row wants, at least 1; 16 by default, which is 512 tokens.
    pub pages: u32,
    /// Rows at positions that are a multiple of this are looked at, at least 1; 4 by default.
    pub every: u32,
    /// Pages of each KV head of a sequence that are known at most, the newest; 4096 by default, which is 131,072 tokens.
    pub known: u32,
}

impl Default for Hits {
    fn default() -> Hits {
        Hits { pages: 16, every: 4, known: 4096 }
    }
}

impl Hits {
    /// The defaults.
    pub fn new() -> Hits {
        Hits::default()
    }
}

setters!(Hits { pages: u32, every: u32, known: u32 });
