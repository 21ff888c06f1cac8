//! Caches whose full pages lie on the ranks of a fabric.

use crate::base::error::{ConfigError, Error, FabricError};
use crate::cache::Cache;
use crate::config::CacheConfig;
use crate::fabric::{Fabric, Front, Moves, Options, RankUsage, Skew};
use crate::metrics::Traffic;
use crate::router::Eplb;
use std::sync::Arc;

impl Cache {
    /// Builds a cache that keeps full pages on the ranks of a fabric, those of shard `s` of the map on rank `s % ranks`. The budget of the
    /// configuration is for the pages of the front: ring, sinks, pages that are not full, and pages that a fork shares or a rollback can
    /// reach. Each rank has a budget of its own.
    ///
    /// Results have the bits of a cache in one process, except with [`Options::fast`]. Pages are fetched from their ranks for policies that
    /// read pages, for [`Sequence::read`](crate::Sequence::read), and to merge thinned-out pages.
    ///
    /// # Errors
    /// [`Error::Config`]: an invalid configuration, [`ConfigError::Fabric`] for tiers or a device at the front, [`ConfigError::Shards`] for
    /// more ranks than shards are possible. [`Error::Fabric`] if a rank does not answer, has another version, or was built from another
    /// configuration.
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

    /// Usage of each rank of the fabric. Sends a request to each rank.
    ///
    /// # Errors
    /// [`FabricError::None`] for a cache without a fabric; [`FabricError::Lost`].
    pub fn ranks(&self) -> Result<Vec<RankUsage>, Error> {
        Ok(self.front()?.usage()?)
    }

    /// Traffic over the fabric since the cache was built.
    ///
    /// # Errors
    /// [`FabricError::None`] for a cache without a fabric.
    pub fn traffic(&self) -> Result<Traffic, Error> {
        Ok(self.front()?.traffic())
    }

    /// How evenly pages are spread over the ranks that answer. Sends a request to each rank.
    ///
    /// # Errors
    /// [`FabricError::None`] for a cache without a fabric; [`FabricError::Lost`].
    pub fn skew(&self) -> Result<Skew, Error> {
        Ok(self.front()?.skew()?)
    }

    /// Assigns the experts of a layer to ranks by DeepSeek's EPLB, and moves their pages: block `t` of an expert goes to the rank of its
    /// replica `t mod replicas`, so an expert with more load has its pages on more ranks. `loads` is the load of each expert, in any unit;
    /// `None` takes the bytes that attention read of each expert since the last assignment. New blocks follow the assignment. O(pages of
    /// the layer).
    ///
    /// Other threads may attend meanwhile: a block is copied before it is removed, and stays until its readers are done.
    ///
    /// # Errors
    /// [`FabricError::None`]; [`FabricError::Placement`]; [`FabricError::Count`] unless there is one load for each expert, and one device
    /// for each rank; [`FabricError::Lost`], [`FabricError::Budget`]. Blocks already moved stay moved; no page is lost.
    pub fn rebalance(&self, layer: usize, eplb: &Eplb, loads: Option<&[f64]>) -> Result<Moves, Error> {
        self.inner.shape.layer(layer)?;
        Ok(self.front()?.rebalance(layer, eplb, loads)?)
    }

    /// Keeps each page of an expert on `copies` ranks. Reads go to the copy on the rank with the least to do, and a page with another copy
    /// survives the loss of a rank. New blocks are replicated by the next call. 1 removes all copies but one.
    ///
    /// # Errors
    /// [`FabricError::None`]; [`Error::Layer`], [`Error::Expert`]; [`FabricError::Count`] for 0 copies or more than there are ranks;
    /// [`FabricError::Lost`], [`FabricError::Budget`]. Blocks already copied stay; no page is lost.
    pub fn replicate(&self, layer: usize, expert: u16, copies: u32) -> Result<Moves, Error> {
        self.inner.shape.layer(layer)?;
        let (front, experts) = (self.front()?, self.config().experts);
        if u32::from(expert) >= experts {
            return Err(Error::Expert { layer, row: 0, expert, experts });
        }
        Ok(front.replicate(layer, expert, copies)?)
    }
}
