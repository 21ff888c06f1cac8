//! Configuration of a cache.

pub(crate) mod hits;
pub(crate) mod shape;
pub(crate) mod sharing;

use crate::backend::Backend;
use crate::base::error::ConfigError;
use crate::base::error::MAX_SHARDS;
use crate::base::frequencies::Frequencies;
use crate::codec::{Codec, HeadCodec};
use crate::config::hits::Hits;
use crate::policy::Eviction;
use crate::policy::rule::Rule;
use crate::tiers::Tiers;
use pikv_core::page::{MAX_DIM, Position};
use pikv_core::plan::{LayerShape, StoreShape};
use pikv_core::ring::Ring;
use pikv_core::shard::ShardMap;
use pikv_lanes::Lanes;
use std::ops::Range;
use std::sync::Arc;

/// Shape, policies and budget of a [`Cache`](crate::Cache). Building the cache checks it.
///
/// Start with [`CacheConfig::new`] and set the fields that differ from the defaults. A dense model needs none of `experts`, `top_k` and
/// `shards`.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::codec::{Code, Codec, Coding};
/// use pikv::policy::{Budget, Eviction, StreamingLlm};
/// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
///
/// let layer = LayerShape::new(2, 8, 64, Dtype::Bf16);
/// let int8 = Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8));
/// let config = CacheConfig::new(vec![layer; 4], 64 << 20) // 4 layers, at most 64 MiB of pages
///     .ring(128)                                          // newest tokens, kept in bf16
///     .sinks(4)                                           // first tokens, always kept
///     .rollback(8)                                        // drafts of up to 8 tokens
///     .compress(int8)                                     // all others in int8
///     .evict(Eviction::new(StreamingLlm, Budget::Tokens(4096)).by_page());
/// let cache = Cache::new(config)?;
/// assert_eq!(cache.config().ring, 128);
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CacheConfig {
    /// The attention layers, in order.
    pub layers: Vec<LayerShape>,
    /// Newest tokens of each sequence, which stay in the ring in order of position, neither packed nor evicted; 256 by default. Make it at
    /// least as long as the longest step: then results do not depend on how tokens are split into steps. A ring costs `ring / 32 + 1` pages
    /// for each layer, KV head and sequence.
    pub ring: u32,
    /// First positions of a sequence, kept in pages of their own: every sliding window sees them, and they are never evicted.
    /// `None` takes the number from the policy of each layer, [`Policy::sinks`](crate::policy::Policy::sinks): 4 for
    /// [`StreamingLlm`](crate::policy::StreamingLlm), 0 for the other policies of this crate and for layers without one.
    pub sinks: Option<u32>,
    /// Tokens that [`Sequence::rollback`](crate::Sequence::rollback) can take back after any step, such as the draft length of speculative
    /// decoding; 0 by default. At most 1024 with a policy that keeps state per token or head.
    pub rollback: u32,
    /// Experts of the model, at most 65,535; 1 by default, for a dense model.
    pub experts: u32,
    /// Experts of each token; 1 by default.
    pub top_k: u32,
    /// Assignment of blocks of pages to shards; one shard by default.
    pub shards: ShardMap,
    /// Bytes of pages that may be in use, over all shards. Pages live in chunks of 2 MiB, and a chunk has one page size and one shard: the
    /// process can hold up to a chunk more for each size and shard, and after evictions the free pages of chunks that still have pages in
    /// use. RoPE tables are not counted.
    pub budget: u64,
    /// Fill pages with NaN when they are allocated and when they are freed, to find reads of unwritten memory; off by default. A
    /// device always fills allocated pages; of a freed page of a device only the positions are filled, which the host holds.
    pub nan_fill: bool,
    /// Overwrite pages when they are freed, in the budget and in lower tiers, so that no data of a sequence stays in them; off by default.
    /// It costs a write of each page. It does not cover copies made during a call (staging buffers, tensors of the
    /// caller), data that a [`PageStore`](crate::tiers::PageStore) keeps after an overwrite, and pages of a process that is killed.
    /// [`Cache::failures`](crate::Cache::failures) counts pages that could not be overwritten.
    pub wipe: bool,
    /// Keep the least and largest value of each channel of a full page's keys, from which [`ReadPages::Quest`](crate::attend::options::ReadPages::Quest) selects pages: 8
    /// bytes for each channel of K and page.
    pub key_bounds: bool,
    /// Definition of a hit; if set, hits are counted from the first token. With `None`, the default, counting starts, by
    /// [`Hits::default`], when a policy, the router of a [`ClosedLoop`](crate::ClosedLoop) or its sink asks for hits.
    pub hits: Option<Hits>,
    /// SIMD instructions to compute with; the fastest of this machine by default. Results do not depend on them.
    pub lanes: Lanes,
    /// Where pages lie and attention runs; the CPU by default.
    pub backend: Backend,
    /// Codecs of tokens that left the ring; the last rule for a head applies. Heads without a rule keep the dtype of their layer.
    pub codecs: Vec<CodecRule>,
    /// Second codecs of packed pages; the last rule for a head applies.
    pub ages: Vec<AgeRule>,
    /// Eviction of tokens that left the ring; the last rule for a layer applies. Layers without a rule keep all tokens.
    pub evictions: Vec<EvictionRule>,
    /// Frequencies of scaled RoPE, for ranges of layers; none by default. The last entry for a layer applies.
    pub frequencies: Vec<(Range<usize>, Frequencies)>,
    /// Lower tiers for pages beyond the budget; none by default.
    pub tiers: Tiers,
}

/// Eviction of one layer or all.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EvictionRule {
    /// Layer; all layers if `None`.
    pub layer: Option<usize>,
    /// Policy and budget.
    pub eviction: Eviction,
}

/// Codec of one head, one layer or all.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CodecRule {
    /// Layer; all layers if `None`.
    pub layer: Option<usize>,
    /// KV head; all KV heads if `None`.
    pub kv_head: Option<usize>,
    /// Codec of tokens that left the ring.
    pub codec: Codec,
}

/// Second codec of one head, one layer or all.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AgeRule {
    /// Layer; all layers if `None`.
    pub layer: Option<usize>,
    /// KV head; all KV heads if `None`.
    pub kv_head: Option<usize>,
    /// Tokens that leave the ring between the first packing and the second.
    pub after: u32,
    /// Second codec.
    pub codec: Codec,
}

/// The codecs of a layer's KV heads.
pub(crate) type HeadCodecs = Arc<[Option<HeadCodec>]>;

impl CacheConfig {
    /// A configuration with `budget` bytes of pages for `layers`: a ring of 256 tokens, sinks of the policies, no rollback, one expert, one
    /// shard, the fastest lanes of the machine.
    pub fn new(layers: Vec<LayerShape>, budget: u64) -> Self {
        CacheConfig {
            layers,
            ring: 256,
            sinks: None,
            rollback: 0,
            experts: 1,
            top_k: 1,
            shards: ShardMap::ONE,
            budget,
            nan_fill: false,
            wipe: false,
            key_bounds: false,
            hits: None,
            lanes: Lanes::detect(),
            backend: Backend::CPU,
            codecs: Vec::new(),
            ages: Vec::new(),
            evictions: Vec::new(),
            frequencies: Vec::new(),
            tiers: Tiers::new(),
        }
    }

    /// Sets the tokens of the ring.
    pub fn ring(mut self, tokens: u32) -> Self {
        self.ring = tokens;
        self
    }

    /// Sets the sinks of all layers, whatever their policies ask for; 0 for none.
    pub fn sinks(mut self, tokens: u32) -> Self {
        self.sinks = Some(tokens);
        self
    }

    /// Sets how many tokens a rollback can take back after any step.
    pub fn rollback(mut self, tokens: u32) -> Self {
        self.rollback = tokens;
        self
    }

    /// Sets the number of experts of the model, and of each token.
    pub fn experts(mut self, experts: u32, top_k: u32) -> Self {
        self.experts = experts;
        self.top_k = top_k;
        self
    }

    /// Sets the assignment of pages to shards.
    pub fn shards(mut self, map: ShardMap) -> Self {
        self.shards = map;
        self
    }

    /// Sets whether allocated and freed pages are filled with NaN.
    pub fn nan_fill(mut self, on: bool) -> Self {
        self.nan_fill = on;
        self
    }

    /// Sets whether pages are overwritten when they are freed.
    pub fn wipe(mut self, on: bool) -> Self {
        self.wipe = on;
        self
    }

    /// Sets whether the least and largest value of each channel of a page's keys are kept.
    pub fn key_bounds(mut self, on: bool) -> Self {
        self.key_bounds = on;
        self
    }

    /// Sets the definition of a hit, and counts hits from the first token.
    pub fn hits(mut self, hits: Hits) -> Self {
        self.hits = Some(hits);
        self
    }

    /// Sets the SIMD instructions.
    pub fn lanes(mut self, lanes: Lanes) -> Self {
        self.lanes = lanes;
        self
    }

    /// Sets the back end.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Packs tokens that leave the ring, in every layer and head.
    pub fn compress(mut self, codec: Codec) -> Self {
        self.codecs.push(CodecRule { layer: None, kv_head: None, codec });
        self
    }

    /// Packs tokens that leave the ring of one layer.
    pub fn compress_layer(mut self, layer: usize, codec: Codec) -> Self {
        self.codecs.push(CodecRule { layer: Some(layer), kv_head: None, codec });
        self
    }

    /// Packs tokens that leave the ring of one KV head of one layer.
    pub fn compress_head(mut self, layer: usize, kv_head: usize, codec: Codec) -> Self {
        self.codecs.push(CodecRule { layer: Some(layer), kv_head: Some(kv_head), codec });
        self
    }

    /// Packs pages a second time, by `codec`, when `after` more tokens have left the ring since the first packing: int8, then int4,
    /// say. The second codec packs the output of the first. A rollback restores the first form to the bit: pages within its reach
    /// are held in both forms.
    pub fn age(mut self, after: u32, codec: Codec) -> Self {
        self.ages.push(AgeRule { layer: None, kv_head: None, after, codec });
        self
    }

    /// [`CacheConfig::age`] in one layer.
    pub fn age_layer(mut self, layer: usize, after: u32, codec: Codec) -> Self {
        self.ages.push(AgeRule { layer: Some(layer), kv_head: None, after, codec });
        self
    }

    /// [`CacheConfig::age`] in one KV head of one layer.
    pub fn age_head(mut self, layer: usize, kv_head: usize, after: u32, codec: Codec) -> Self {
        self.ages.push(AgeRule { layer: Some(layer), kv_head: Some(kv_head), after, codec });
        self
    }

    /// Evicts tokens that left the ring, in every layer.
    pub fn evict(mut self, eviction: Eviction) -> Self {
        self.evictions.push(EvictionRule { layer: None, eviction });
        self
    }

    /// Evicts tokens that left the ring of one layer.
    pub fn evict_layer(mut self, layer: usize, eviction: Eviction) -> Self {
        self.evictions.push(EvictionRule { layer: Some(layer), eviction });
        self
    }

    /// Sets the RoPE frequencies of some layers, in place of those that [`Rope::theta`](pikv_core::rope::Rope) gives: for models
    /// with `rope_scaling` in their `config.json`. The last call for a layer applies. In layers that receive rotated keys the cache
    /// rotates nothing; the frequencies tell policies how the keys were rotated
    /// ([`ExpectedAttention`](crate::policy::ExpectedAttention)).
    pub fn frequencies(mut self, layers: Range<usize>, frequencies: Frequencies) -> Self {
        self.frequencies.push((layers, frequencies));
        self
    }

    /// Sets the tiers below the budget.
    pub fn tiers(mut self, tiers: Tiers) -> Self {
        self.tiers = tiers;
        self
    }

    /// The eviction rule of a layer.
    fn eviction_of(&self, layer: usize) -> Option<&EvictionRule> {
        self.evictions.iter().rev().find(|rule| rule.layer.is_none_or(|of| of == layer))
    }

    /// The sinks of a layer.
    fn sinks_of(&self, layer: usize) -> u32 {
        let asked = || self.eviction_of(layer).map_or(0, |rule| rule.eviction.policy.sinks());
        self.sinks.unwrap_or_else(asked)
    }

    /// The eviction rule of each layer.
    ///
    /// # Errors
    /// [`ConfigError::PolicyLayer`] for a rule of a missing layer; errors of [`Rule::new`], such as a budget that does not fit the layer.
    pub(crate) fn rules(
        &self,
        frequencies: &[Option<Frequencies>],
    ) -> Result<Vec<Option<Arc<Rule>>>, ConfigError> {
        let layers = self.layers.len();
        if let Some(layer) =
            self.evictions.iter().filter_map(|rule| rule.layer).find(|layer| *layer >= layers)
        {
            return Err(ConfigError::PolicyLayer { layer, layers });
        }
        let rule = |(l, shape): (usize, &LayerShape)| {
            let Some(rule) = self.eviction_of(l) else { return Ok(None) };
            let new = Rule::new(l, shape, &rule.eviction, self.rollback)?;
            Ok(Some(Arc::new(Rule { frequencies: frequencies[l].clone(), ..new })))
        };
        self.layers.iter().enumerate().map(rule).collect()
    }

    /// Frequencies of each layer with scaled RoPE, `None` for the others.
    pub(crate) fn layers_frequencies(&self) -> Result<Vec<Option<Frequencies>>, ConfigError> {
        let mut of: Vec<Option<Frequencies>> = vec![None; self.layers.len()];
        for (layers, frequencies) in &self.frequencies {
            for layer in layers.clone() {
                let Some(shape) = self.layers.get(layer) else {
                    return Err(ConfigError::FrequencyLayer { layer, layers: self.layers.len() });
                };
                let policy = self.eviction_of(layer).and_then(|rule| rule.eviction.policy.rotation());
                let rope = shape.rope.or(policy);
                let (got, pairs) = (frequencies.inverse().len(), rope.map_or(0, |rope| rope.rotary_dim / 2));
                if pairs as usize != got {
                    return Err(ConfigError::Frequencies { layer, got, pairs });
                }
                of[layer] = Some(frequencies.clone());
            }
        }
        for (layer, shape) in self.layers.iter().enumerate() {
            let Some(policy) = self.eviction_of(layer).map(|rule| &rule.eviction.policy) else { continue };
            if shape.rope.is_some() && policy.rotation().is_some_and(|rope| Some(rope) != shape.rope) {
                return Err(ConfigError::PolicyRope { layer, policy: policy.name().to_owned() });
            }
        }
        Ok(of)
    }

    /// The codecs of every head.
    ///
    /// # Errors
    /// [`ConfigError::CodecRule`] for a missing layer or head; errors of [`HeadCodec::new`], such as a map of another width than the head.
    pub(crate) fn head_codecs(&self) -> Result<Vec<HeadCodecs>, ConfigError> {
        let rules = self.codecs.iter().map(|rule| (&rule.layer, &rule.kv_head));
        for (layer, kv_head) in rules.chain(self.ages.iter().map(|rule| (&rule.layer, &rule.kv_head))) {
            let layers = layer.map_or(&self.layers[..], |l| self.layers.get(l..=l).unwrap_or_default());
            let heads = layers.iter().map(|shape| shape.kv_heads).min().unwrap_or(0);
            if layers.is_empty() || kv_head.is_some_and(|head| head >= heads as usize) {
                let layers = self.layers.len();
                return Err(ConfigError::CodecRule {
                    layer: *layer,
                    kv_head: *kv_head,
                    layers,
                    kv_heads: heads,
                });
            }
        }
        let layer = |(l, shape): (usize, &LayerShape)| {
            (0..shape.kv_heads as usize)
                .map(|h| {
                    let mut rules = self.codecs.iter().rev();
                    let rule = rules.find(|r| {
                        r.layer.is_none_or(|layer| layer == l) && r.kv_head.is_none_or(|head| head == h)
                    });
                    let first = rule.map(|rule| HeadCodec::new(l, &shape.layout, &rule.codec)).transpose()?;
                    let mut rules = self.ages.iter().rev();
                    let age = rules.find(|r| {
                        r.layer.is_none_or(|layer| layer == l) && r.kv_head.is_none_or(|head| head == h)
                    });
                    match age {
                        Some(age) => self.aged(l, h, first, age).map(Some),
                        None => Ok(first),
                    }
                })
                .collect()
        };
        let codecs: Vec<HeadCodecs> = self.layers.iter().enumerate().map(layer).collect::<Result<_, _>>()?;
        let means = |heads: &HeadCodecs| heads.iter().flatten().any(HeadCodec::has_means);
        for (layer, _) in codecs.iter().enumerate().filter(|(_, heads)| means(heads)) {
            let rule = self.eviction_of(layer);
            if rule.is_some_and(|rule| !rule.eviction.by_page) {
                return Err(ConfigError::MeansEvicted { layer });
            }
        }
        Ok(codecs)
    }

    /// A head's codec, with the second codec of `rule`.
    fn aged(
        &self,
        layer: usize,
        kv_head: usize,
        first: Option<HeadCodec>,
        rule: &AgeRule,
    ) -> Result<HeadCodec, ConfigError> {
        let refused = |why| ConfigError::Age { layer, kv_head, after: rule.after, why };
        let Some(mut first) = first else {
            return Err(refused("they are not packed at all; set CacheConfig::compress"));
        };
        let second = HeadCodec::new(layer, &self.layers[layer].layout, &rule.codec)?;
        if rule.after == 0 {
            return Err(refused("it must be at least 1; for 0, set the codec itself"));
        }
        if second.packed.bytes() >= first.packed.bytes() {
            return Err(refused("the second codec must take fewer bytes than the first"));
        }
        if !self.tiers.specs.is_empty() {
            return Err(refused("pages in lower tiers are not packed again; use one of the two"));
        }
        first.age(rule.after, second);
        Ok(first)
    }

    pub(crate) fn common_ring(&self) -> Result<Ring, ConfigError> {
        Ring::new(self.ring, self.rollback)
            .ok_or(ConfigError::Ring { ring: self.ring, rollback: self.rollback })
    }

    /// How sequences take pages in each layer, for the planner and the allocator.
    ///
    /// # Errors
    /// The first invalid value, such as [`ConfigError::NoLayers`], [`ConfigError::Ring`] or [`ConfigError::Budget`].
    pub fn stores(&self) -> Result<Vec<StoreShape>, ConfigError> {
        if self.layers.is_empty() {
            return Err(ConfigError::NoLayers);
        }
        for (layer, shape) in self.layers.iter().enumerate() {
            check_layer(layer, shape)?;
        }
        let ring = self.common_ring()?;
        let (experts, top_k) = (self.experts, self.top_k);
        if experts == 0 || experts > u32::from(u16::MAX) || top_k == 0 || top_k > experts {
            return Err(ConfigError::Experts { experts, top_k });
        }
        if let Some(Hits { pages, every, .. }) = self.hits.filter(|hits| hits.pages == 0 || hits.every == 0) {
            return Err(ConfigError::Hits { pages, every });
        }
        if self.shards.shards() > MAX_SHARDS {
            return Err(ConfigError::Shards { shards: self.shards.shards() });
        }
        let store = |layer| StoreShape::new(ring, self.sinks_of(layer), experts);
        let stores: Vec<StoreShape> = (0..self.layers.len()).map(store).collect();
        if let Some(sinks) = stores.iter().map(|store| store.sinks).find(|sinks| *sinks > Position::MAX.0) {
            return Err(ConfigError::Sinks { sinks });
        }
        let needed = self.layers.iter().map(|l| u64::from(l.kv_heads) * l.layout.bytes()).sum();
        if self.budget < needed {
            return Err(ConfigError::Budget { budget: self.budget, needed });
        }
        Ok(stores)
    }
}

fn check_layer(layer: usize, shape: &LayerShape) -> Result<(), ConfigError> {
    let LayerShape { kv_heads, query_heads, layout, window, rope, .. } = *shape;
    if kv_heads == 0 || query_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
        return Err(ConfigError::Heads { layer, kv_heads, query_heads });
    }
    let (k_dim, v_dim) = (layout.k_dim, layout.v_dim);
    if !(1..=MAX_DIM).contains(&k_dim) || !(1..=MAX_DIM).contains(&v_dim) {
        return Err(ConfigError::Dim { layer, k_dim, v_dim });
    }
    if let Some(window) = window
        && !(1..=Position::MAX.0).contains(&window)
    {
        return Err(ConfigError::Window { layer, window });
    }
    if let Some(rope) = rope {
        let (theta, rotary_dim) = (rope.theta, rope.rotary_dim);
        let turns = rotary_dim >= 2 && rotary_dim <= k_dim && rotary_dim.is_multiple_of(2);
        if !(theta.is_finite() && theta >= 1.0 && turns) {
            return Err(ConfigError::Rope { layer, theta, rotary_dim, k_dim });
        }
    }
    Ok(())
}
