//! Configuration of hit counting.

/// Definition of a hit, for [`CacheConfig::hits`](crate::CacheConfig::hits).
///
/// Of all pages of a KV head that left the ring, held or not, a row *wants* those with the highest bounds on its scores
/// ([`ReadPages::Quest`](crate::attend::options::ReadPages::Quest) selects by the same bounds); where rows read the pages of their experts only, it
/// wants only pages of its experts. A wanted page in the first tier is a *hit*; a page that lost some of its tokens counts by the share of
/// them that is held. A wanted page is a *miss* if it was evicted, lies in a lower tier or on another rank of a fabric, or belongs to an
/// expert that is not fetched. Hits and misses are counted in pages.
///
/// A page is counted only after no rollback can reach its tokens, checked every 32 positions. To rank evicted pages, the cache keeps the least and
/// largest value of each channel of their keys: 4 bytes a channel of K, rounded up to 32 channels, which is 3.1 % of a page in 16 bits.
/// It keeps them for held pages too; [`Cache::bytes_at`](crate::Cache::bytes_at) and
/// [`Usage::ghosts`](crate::report::Usage::ghosts) count the bytes.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::policy::{Budget, Eviction, StreamingLlm};
/// use pikv::rules::Hits;
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, StepReport};
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
///     step.attend(0, &[1.0; 8], &Attend::new(0.5), AttendOutput::new(&mut [0.0; 8]))?;
///     step.commit_with(&mut report)?;
/// }
/// // The last row wanted two pages; the oldest tokens were evicted.
/// assert_eq!((report.hits(0), report.misses(0)), (&[0.0][..], &[2.0][..]));
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hits {
    /// Pages that a row wants in each KV head, at least 1; 16 by default, which is 512 tokens.
    pub pages: u32,
    /// Only rows whose position is a multiple of this are counted, at least 1; 4 by default.
    pub every: u32,
    /// Most pages remembered for each KV head of a sequence, the newest; 4096 by default, which is 131,072 tokens.
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
