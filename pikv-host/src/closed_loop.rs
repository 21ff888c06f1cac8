//! The closed loop: misses of attention and evictions change how the next tokens are routed.

mod device;
mod learnt;
mod save;
mod step;

use self::device::Devices;
use self::learnt::Learnt;
pub use self::step::LoopStep;
use crate::base::error::Error;
use crate::cache::Cache;
use crate::cache::sequence::Sequence;
use crate::metrics::Sink;
use crate::metrics::report::{ByPart, StepReport};
use crate::router::{RouteError, Router, Routes};
use pikv_core::page::Position;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use thiserror::Error;

/// Reasons why a call of the loop failed. The sequences and routers are as before the step, except after [`LoopError::Committed`]: the step
/// is then committed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum LoopError {
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] Error),
    /// An error of a router.
    #[error("layer {layer}: {source}")]
    Route {
        /// Layer of the router.
        layer: usize,
        /// Error of the router.
        source: RouteError,
    },
    /// The step is committed and all other routers have learnt from it; this router failed to learn and has dropped its choices in the
    /// step.
    #[error("the step is committed, but the router of layer {layer} did not learn from it: {source}")]
    Committed {
        /// Layer of the router, the first if several failed.
        layer: usize,
        /// Error of the router.
        source: RouteError,
    },
    /// The number of routers is not the number of layers.
    #[error("{got} routers for {layers} layers; one for each is needed")]
    Routers {
        /// Routers given.
        got: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// `experts` or `top_k` of a router differ from the cache's.
    #[error(
        "the router of layer {layer} takes {top_k} of {experts} experts, the cache {cache_top_k} of {cache_experts}"
    )]
    Shape {
        /// Layer of the router.
        layer: usize,
        /// Experts of the router.
        experts: u32,
        /// Experts of each token in the router.
        top_k: u32,
        /// Experts of the cache.
        cache_experts: u32,
        /// Experts of each token in the cache.
        cache_top_k: u32,
    },
}

/// A cache, a router for each layer, and a metrics sink in one loop: misses and evictions of a step change how the next tokens are routed
/// (arXiv 2508.06526, algorithm 1, with fetch and update in the order that a model needs).
///
/// A step calls, layer by layer, [`append`](LoopStep::append), [`attend`](LoopStep::attend) and [`route`](LoopStep::route), in the order of
/// the model. If rows read only the pages of their experts ([`ReadPages::Experts`](crate::ReadPages::Experts)), `route` comes before `attend`, from
/// logits that exist before attention: of a gate over the layer's input, or of the layer before. At the end [`commit`](LoopStep::commit)
/// files tokens that left the ring, gives policies their attention feedback, counts hits and misses of each expert if a router, a policy or
/// the sink needs them ([`Hits`](crate::rules::Hits)), evicts tokens over the budgets, and lets the routers learn. Each stage can also be
/// called alone, on [`Step`](crate::Step), [`Sequence`] and [`Router`].
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::policy::{Budget, Eviction, H2o};
/// use pikv::router::{CacheAware, Shape};
/// use pikv::rules::Hits;
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, LayerShape};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let config = CacheConfig::new(vec![layer], 1 << 20).ring(4).experts(4, 2).hits(Hits::new().every(1));
/// let cache = Cache::new(config.evict(Eviction::new(H2o, Budget::Tokens(12)).batch(1)))?;
/// let router = CacheAware::default().router(Shape::new(4, 2))?;
/// let mut looped = ClosedLoop::new(cache.clone(), vec![Box::new(router)])?;
/// let mut sequence = cache.sequence();
/// for i in 0..200 {
///     let x = (i as f32).sin();
///     let mut out = [0.0; 8];
///     let mut step = looped.begin([(&mut sequence, 1)])?;
///     step.append(0, &[x; 4], &[1.0; 4])?;
///     step.attend(0, &[x; 8], &Attend::new(0.5), AttendOutput::new(&mut out))?;
///     let routes = step.route(0, &[x, -x, 0.5, 0.0])?;
///     assert_eq!(routes.model().experts.len(), 2);     // what the model mixes
///     step.commit()?;
/// }
/// assert_eq!(sequence.resident(0, 0)?.0, 12);
/// let report = looped.report();
/// assert!(report.misses(0).iter().sum::<f64>() > 0.0); // evicted pages that the last row wanted
/// assert!(report.residency() < 0.1);                   // 8 of 196 tokens that left the ring are held
/// # Ok(())
/// # }
/// ```
pub struct ClosedLoop {
    cache: Cache,
    routers: Vec<Box<dyn Router>>,
    sink: Arc<dyn Sink>,
    routes: Vec<Routes>,
    report: StepReport,
    learnt: Learnt,
    /// State of the routers on the cache's device.
    devices: Devices,
    /// Whether a step is under way or was leaked.
    open: bool,
    scratch: Scratch,
}

/// Buffers of a step, kept for the next.
#[derive(Default)]
struct Scratch {
    /// First position and number of rows of each sequence of the step.
    starts: Vec<(Position, usize)>,
    /// Logits widened to f32, for input in 16 bits.
    logits: Vec<f32>,
    /// Hits of each expert, summed over all layers.
    hits: Vec<f64>,
    misses: Vec<f64>,
    /// For each expert of a layer, in 32nds of pages: wanted, and missed.
    parts: [Vec<u64>; 2],
    /// The same in 32 bits, for [`PageFeedback`](crate::router::PageFeedback).
    wanted: Vec<u32>,
    missed: Vec<u32>,
}

impl std::fmt::Debug for ClosedLoop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClosedLoop").field("cache", &self.cache).field("routers", &self.routers).finish()
    }
}

impl ClosedLoop {
    /// Builds a loop over `cache`, with a router for each layer. On a device it loads the kernels that rank experts, unless no router can
    /// choose there ([`LoopStep::route_device`]).
    ///
    /// # Errors
    /// [`LoopError::Routers`] unless there is one router for each layer, [`LoopError::Shape`] for a router with other experts than the
    /// cache; [`LoopError::Cache`] if kernels do not load.
    pub fn new(cache: Cache, routers: Vec<Box<dyn Router>>) -> Result<ClosedLoop, LoopError> {
        let config = cache.config();
        let layers = config.layers.len();
        if routers.len() != layers {
            return Err(LoopError::Routers { got: routers.len(), layers });
        }
        let (cache_experts, cache_top_k) = (config.experts, config.top_k);
        for (layer, router) in routers.iter().enumerate() {
            let shape = router.shape();
            let (experts, top_k) = (shape.experts, shape.top_k);
            if (experts, top_k) != (cache_experts, cache_top_k) {
                return Err(LoopError::Shape { layer, experts, top_k, cache_experts, cache_top_k });
            }
        }
        if routers.iter().any(|router| router.wants_hits()) {
            cache.inner.pool.ask();
        }
        let routes = (0..layers).map(|_| Routes::default()).collect();
        let learnt = Learnt::new(cache.inner.shape.store.ring.slack());
        let by_part = learnt.is_on().then(ByPart::default);
        let (sink, report) = (Arc::new(()), StepReport { by_part, ..StepReport::default() });
        let devices = Devices::new(&cache, &routers)?;
        let scratch = Scratch::default();
        Ok(ClosedLoop { cache, routers, sink, routes, report, learnt, devices, open: false, scratch })
    }

    /// Sets the sink, which receives the metrics of every committed step.
    pub fn sink(mut self, sink: Arc<dyn Sink>) -> ClosedLoop {
        if sink.wants_hits() {
            self.cache.inner.pool.ask();
        }
        self.sink = sink;
        self
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The routers, to inspect their states ([`ClosedLoop::save`] writes them). Tokens that were rolled back are first forgotten.
    pub fn routers(&mut self) -> &[Box<dyn Router>] {
        self.routers_mut()
    }

    /// The routers, to restore their states. Tokens that were rolled back are first forgotten.
    pub fn routers_mut(&mut self) -> &mut [Box<dyn Router>] {
        // An error is dropped here: the next step returns it, if it persists.
        let _ = self.learnt.forget(&mut self.routers);
        &mut self.routers
    }

    /// Past steps kept because a rollback can reach their tokens: at most one for each token that a rollback can take back; with sequences
    /// that do not advance, at most 64 and four for each such token.
    pub fn kept_steps(&self) -> usize {
        self.learnt.steps()
    }

    /// Report of the last committed step.
    pub fn report(&self) -> &StepReport {
        &self.report
    }

    /// Starts a step, as [`Cache::begin`]. First the routers forget tokens that were rolled back since they learnt from them, as far as the
    /// cache's rollback reaches ([`CacheConfig::rollback`](crate::CacheConfig::rollback)) and unless a fork still has them. Their state is
    /// then as if these tokens had never been routed; bit for bit if their sequence was alone in its steps. For a step rolled back in part,
    /// hits and misses of the whole step count.
    ///
    /// # Errors
    /// The errors of [`Cache::begin`]; [`LoopError::Route`] for a router that refuses to restore an earlier state of its own: it keeps its
    /// present state.
    pub fn begin<'a>(
        &'a mut self,
        parts: impl IntoIterator<Item = (&'a mut Sequence, u32)>,
    ) -> Result<LoopStep<'a>, LoopError> {
        let step = self.cache.begin(parts)?;
        let forgotten = self.forget_undone();
        self.open = true;
        forgotten?;
        self.learnt.begin(self.routers.len(), step.parts());
        self.routes.iter_mut().for_each(Routes::clear);
        Ok(LoopStep { step: Some(step), of: self })
    }

    /// Makes the routers forget rolled back tokens and the choices of a step that was leaked instead of dropped.
    fn forget_undone(&mut self) -> Result<(), LoopError> {
        if std::mem::take(&mut self.open) {
            self.routers.iter_mut().for_each(forget);
        }
        self.devices.forget();
        let forgotten = self.learnt.forget(&mut self.routers);
        forgotten.map_err(|(layer, source)| LoopError::Route { layer, source })
    }
}

/// Makes a router forget its choices since it last learnt. A panic of the router is ignored: nothing more can be done, and the caller may
/// be unwinding.
fn forget(router: &mut Box<dyn Router>) {
    let _ = catch_unwind(AssertUnwindSafe(|| router.discard()));
}
