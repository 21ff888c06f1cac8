//! A checked configuration and the values derived from it, fixed for the life of a cache.

use crate::base::error::{ConfigError, Error};
use crate::base::frequencies::Frequencies;
use crate::base::ids::{Place, block_of};
use crate::config::{CacheConfig, HeadCodecs};
use crate::policy::rule::Rule;
use pikv_core::codec::packed::Packed;
use pikv_core::page::{PAGE, Position};
use pikv_core::plan::{LayerShape, StoreShape};
use pikv_core::ring::Ring;
use std::sync::Arc;

/// Shape of a cache: its configuration, and the values of each layer that follow from it.
#[derive(Debug)]
pub(crate) struct CacheShape {
    pub config: CacheConfig,
    pub store: Common,
    /// By layer.
    pub stores: Vec<StoreShape>,
    /// By layer.
    pub codecs: Vec<HeadCodecs>,
    /// Eviction of each layer.
    pub rules: Vec<Option<Arc<Rule>>>,
    /// By layer; `None` without scaled RoPE.
    pub frequencies: Vec<Option<Frequencies>>,
    /// Whether full pages lie on the ranks of a fabric; the pages of this process then have one arena.
    apart: bool,
}

/// Values that all layers share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common {
    pub ring: Ring,
}

/// For each layer, the number of KV heads in the layers before it.
pub(crate) fn first_heads(layers: &[LayerShape]) -> impl Iterator<Item = u32> + '_ {
    layers.iter().scan(0, |sum, layer| {
        let first = *sum;
        *sum += layer.kv_heads;
        Some(first)
    })
}

impl CacheShape {
    /// Checks a configuration; `apart`: whether full pages lie on the ranks of a fabric.
    ///
    /// # Errors
    /// The errors of [`CacheConfig::stores`]; invalid codecs, frequencies and eviction rules.
    pub fn new(config: CacheConfig, apart: bool) -> Result<CacheShape, ConfigError> {
        let stores = config.stores()?;
        let store = Common { ring: config.common_ring()? };
        let codecs = config.head_codecs()?;
        let frequencies = config.layers_frequencies()?;
        let rules = config.rules(&frequencies)?;
        Ok(CacheShape { config, store, stores, codecs, rules, frequencies, apart })
    }

    pub fn layer(&self, layer: usize) -> Result<&LayerShape, Error> {
        self.config.layers.get(layer).ok_or(Error::Layer { layer, layers: self.config.layers.len() })
    }

    /// Layout of packed pages of each KV head of an existing layer.
    pub fn packed(&self, layer: usize) -> impl Iterator<Item = Option<&Packed>> {
        self.codecs[layer].iter().map(|codec| codec.as_ref().map(|codec| &codec.packed))
    }

    /// Rows of a step at `first` count pages (as hits or misses) whose tokens all lie before this position: no rollback reaches them, and
    /// their tile of 32 positions is full.
    pub fn known_before(&self, first: u32) -> u32 {
        let kept = self.store.ring.kept_from(first);
        kept - kept % PAGE
    }

    /// Whether any layer evicts.
    pub fn evicts(&self) -> bool {
        self.rules.iter().any(Option::is_some)
    }

    /// Checks that a sequence can have a budget of `tokens` for each head.
    ///
    /// # Errors
    /// [`Error::SequenceBudget`] if it is 0, no layer evicts, or every head already has a budget as low.
    pub fn check_budget(&self, tokens: u32) -> Result<(), Error> {
        let refused = |why| Err(Error::SequenceBudget { tokens, why });
        if tokens == 0 {
            return refused("it must be at least 1");
        }
        if !self.evicts() {
            return refused("no layer of the cache evicts; set CacheConfig::evict");
        }
        let acts = |rule: &Rule| {
            let most = |head| rule.eviction.budget.tokens(rule.layer, head, Position::MAX.0);
            let heads = 0..self.config.layers[rule.layer].kv_heads as usize;
            heads.into_iter().any(|head| most(head).is_none_or(|most| most > tokens))
        };
        if self.rules.iter().flatten().any(|rule| acts(rule)) {
            return Ok(());
        }
        refused("the configuration lets no head hold more; give less than its budget")
    }

    /// Shard of a page of a KV head, `head` counted over all layers. The pages of a block share a shard.
    pub fn shard_of(&self, place: Place, ordinal: u32, head: u32) -> u32 {
        if self.apart {
            // The pages of this process have one arena.
            return 0;
        }
        let (map, block) = (&self.config.shards, u64::from(block_of(ordinal)));
        match place {
            Place::Run(e) => map.shard(block, u32::from(e), head),
            Place::Sinks | Place::Ring => map.shared(block, head),
        }
    }
}
