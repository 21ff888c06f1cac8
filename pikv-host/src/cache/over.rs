//! Caches whose full pages lie on the ranks of a fabric.

use crate::base::error::{ConfigError, Error, FabricError};
use crate::cache::Cache;
use crate::config::CacheConfig;
use crate::fabric::{Fabric, Front, Moves, Options, RankUsage, Skew};
use crate::metrics::Traffic;
use crate::router::Eplb;
use std::sync::Arc;

impl Cache {
    /// A cache whose full pages lie on the ranks of a fabric, those of shard `s` of the map on rank `s % ranks`. The budget of
    /// the configuration is that of the front: ring, sinks, and pages that fill up, or that a fork shares or a rollback could
    /// reach; every rank has its own.
    ///
    /// Everything works as in a cache of one process and returns its bits ([`Options::fast`] apart). A page that a policy looks into,
    /// [`Sequence::read`](crate::Sequence::read) and pages that are put together after an eviction are brought here for it.
    ///
    /// # Errors
    /// What is wrong with the configuration, [`ConfigError::Fabric`] for what does not go together, [`ConfigError::Shards`] for more
    /// ranks than there can be shards; [`Error::Fabric`] if a rank does not answer, has another version, or was built from another configuration.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::fabric::{InProcess, Options};
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    /// use pikv::shard::ShardMap;
    /// let layer = LayerShape::new(1, 2, 64, Dtype::Bf16);
    /// let config = CacheConfig::new(vec![layer], 1 << 20).ring(32).shards(ShardMap::sum(4)?);
    /// let ranks = InProcess::new(&config, 4, 16 << 20)?;      // 4 threads with 16 MiB each
    /// let cache = Cache::over(config, Box::new(ranks), Options::default())?;
    /// let mut sequence = cache.sequence();
    /// for _ in 0..64 {
    ///     let mut step = cache.begin([(&mut sequence, 32)])?;
    ///     step.append(0, &[0.5; 32 * 64], &[0.25; 32 * 64])?;
    ///     step.commit()?;
    /// }
    /// let pages: Vec<u64> = cache.ranks()?.iter().map(|rank| rank.pages).collect();
    /// assert_eq!(pages, [16, 16, 16, 16]);                    // 63 that left the ring, and room for the next of the last block
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn over(config: CacheConfig, fabric: Box<dyn Fabric>, options: Options) -> Result<Cache, Error> {
        let refused = [
            (
                !config.backend.is_cpu(),
                "a front on a device",
                "Backend::CPU, with ranks on devices (InProcess::on),",
            ),
            (
                !config.tiers.specs.is_empty(),
                "tiers",
                "CacheConfig::tiers with none, and a larger budget of the ranks",
            ),
        ];
        if let Some((_, what, instead)) = refused.into_iter().find(|(on, ..)| *on) {
            return Err(ConfigError::Fabric { what, instead }.into());
        }
        let front = Front::new(&config, fabric, &options)?;
        Cache::with(config, Some(front))
    }

    fn front(&self) -> Result<&Arc<Front>, FabricError> {
        self.inner.fabric.as_ref().ok_or(FabricError::None)
    }

    /// What each rank of the fabric holds. Asks them all.
    ///
    /// # Errors
    /// A cache that is over none, or a rank that is lost by it.
    pub fn ranks(&self) -> Result<Vec<RankUsage>, Error> {
        Ok(self.front()?.usage()?)
    }

    /// What went over the fabric so far.
    ///
    /// # Errors
    /// A cache that is over none.
    pub fn traffic(&self) -> Result<Traffic, Error> {
        Ok(self.front()?.traffic())
    }

    /// How even the pages are spread over the ranks that are there. Asks them.
    ///
    /// # Errors
    /// A cache that is over no fabric, or a rank that is lost by it.
    pub fn skew(&self) -> Result<Skew, Error> {
        Ok(self.front()?.skew()?)
    }

    /// Places the experts of a layer anew by DeepSeek's EPLB, and moves their pages: block `t` of an expert goes to the rank of
    /// its replica `t mod replicas`, so that an expert with more load has its pages on more ranks. Without `loads` (of each
    /// expert, in any unit), those are the bytes that attention read of it since it was last placed. Blocks that come later
    /// follow. O(pages of the layer).
    ///
    /// Other threads may attend meanwhile: a block is copied before it leaves, and one that is being read stays until it was read.
    ///
    /// # Errors
    /// A cache that is over no fabric; [`FabricError::Placement`]; [`FabricError::Count`] if the devices are not the ranks; a rank
    /// that is lost, or has no room. What moved before stays moved; no page is lost by it.
    pub fn rebalance(&self, layer: usize, eplb: &Eplb, loads: Option<&[f64]>) -> Result<Moves, Error> {
        self.inner.shape.layer(layer)?;
        Ok(self.front()?.rebalance(layer, eplb, loads)?)
    }

    /// Has each page of an expert lie on `copies` ranks: those that read them take turns by what they have to do, and a rank
    /// that is lost takes none of them along. Blocks that come later are replicated by the next call. 1 leaves one copy of
    /// each.
    ///
    /// # Errors
    /// A cache that is over no fabric, no such layer or expert, [`FabricError::Count`] for no copies or more than there are
    /// ranks; a rank that is lost, or has no room. What was copied before stays; no page is lost by it.
    pub fn replicate(&self, layer: usize, expert: u16, copies: u32) -> Result<Moves, Error> {
        self.inner.shape.layer(layer)?;
        let (front, experts) = (self.front()?, self.config().experts);
        if u32::from(expert) >= experts {
            return Err(Error::Expert { layer, row: 0, expert, experts });
        }
        Ok(front.replicate(layer, expert, copies)?)
    }
}
