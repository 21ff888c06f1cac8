//! State that the sequences of a cache share beside its shape: page memory, lower tiers, and RoPE tables.

use crate::base::error::Error;
use crate::base::failures::Counts;
use crate::base::rope_tables::Tables;
use crate::config::hits::Hits;
use crate::config::shape::CacheShape;
use crate::memory::arena::Arenas;
use crate::memory::ghost_bytes::Total;
use crate::policy::rule::Rule;
use crate::tiers::Levels;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Page memory of a cache, and tables that are read with it.
#[derive(Debug)]
pub(crate) struct Pool {
    pub shape: Arc<CacheShape>,
    pub arenas: Arc<Arenas>,
    pub tables: Tables,
    pub tiers: Option<Levels>,
    /// Counts of failures that return no error.
    pub failures: Arc<Counts>,
    /// Whether hits are counted.
    asked: AtomicBool,
    /// Bytes of the bounds that are kept for hits.
    pub ghosts: Arc<Total>,
}

impl Pool {
    /// The pool of a cache of this shape, with no page in use.
    ///
    /// # Errors
    /// [`Error::Tier`] for a tier that could not be opened.
    pub fn new(shape: &Arc<CacheShape>) -> Result<Pool, Error> {
        let CacheShape { config, codecs, frequencies, .. } = &**shape;
        let heads = codecs.iter().flat_map(|heads| heads.iter().flatten());
        let aged = heads.clone().filter_map(|codec| codec.aged.as_ref()).map(|aged| &aged.codec.packed);
        let packed = heads.map(|codec| &codec.packed).chain(aged).map(|packed| (packed.words(), 1));
        let plain = config.layers.iter().map(|layer| (layer.layout.words(), layer.kv_heads));
        let failures = Arc::<Counts>::default();
        let arenas = Arenas::new(config, plain.chain(packed), &failures);
        let tables = Tables::new(&config.layers, frequencies);
        let tiers = Levels::new(&config.tiers, config.backend.is_cpu(), config.wipe, &failures)?;
        let uses = |rule: &Arc<Rule>| rule.wants_hits;
        let asked = AtomicBool::new(config.hits.is_some() || shape.rules.iter().flatten().any(uses));
        let ghosts = Arc::new(Total::new(config.wipe));
        Ok(Pool { shape: shape.clone(), arenas, tables, tiers, failures, asked, ghosts })
    }

    /// Definition of a hit, if hits are counted.
    pub fn hits(&self) -> Option<Hits> {
        self.asked.load(Ordering::Relaxed).then_some(self.shape.config.hits.unwrap_or_default())
    }

    /// Starts to count hits, and to keep bounds of pages that leave the ring from here on.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }
}
