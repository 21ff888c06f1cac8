//! The closed loop: what attention misses and what policies evict changes how the next tokens are routed.

mod device;
mod save;

use self::device::Devices;
use crate::attend::options::{Attend, Output, Read};
use crate::base::device_slice::{DeviceOutput, DeviceSlice};
use crate::base::error::Error;
use crate::base::host_slice::{HostSlice, Scalar};
use crate::cache::Cache;
use crate::cache::sequence::Sequence;
use crate::cache::step::Step;
use crate::metrics::report::{ByPart, StepReport};
use crate::metrics::{Sink, StepMetrics};
use crate::router::learnt::{Learnt, narrow};
use crate::router::{Feedback, RouteError, Router, Routes};
use pikv_core::page::{PAGE, Position};
use smallvec::SmallVec;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use thiserror::Error;

/// Why the loop stopped. The sequences are as before the step, and so are the routers; [`LoopError::Committed`] alone says that the step
/// is over and its tokens are there.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum LoopError {
    /// The cache refused.
    #[error(transparent)]
    Cache(#[from] Error),
    /// A router refused.
    #[error("layer {layer}: {source}")]
    Route {
        /// The layer.
        layer: usize,
        /// Why.
        source: RouteError,
    },
    /// The step is committed, and every other router has learnt from it; this one refused to, and has forgotten what it chose in it.
    #[error("the step is committed, but the router of layer {layer} did not learn from it: {source}")]
    Committed {
        /// The layer, the first if there are several.
        layer: usize,
        /// Why.
        source: RouteError,
    },
    /// Not a router for each layer.
    #[error("{got} routers for {layers} layers; one for each is needed")]
    Routers {
        /// Routers given.
        got: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// A router of other experts than the cache's.
    #[error(
        "the router of layer {layer} takes {top_k} of {experts} experts, the cache {cache_top_k} of {cache_experts}"
    )]
    Shape {
        /// The layer.
        layer: usize,
        /// The router's.
        experts: u32,
        /// The router's.
        top_k: u32,
        /// The cache's.
        cache_experts: u32,
        /// The cache's.
        cache_top_k: u32,
    },
}

/// A cache, a router for each layer, and a metrics sink in one loop (arXiv 2508.06526, algorithm 1, with fetch and update in the order
/// that a model needs): misses and evictions of a step change how the next tokens are routed.
///
/// A step goes, layer by layer, [`append`](LoopStep::append), [`attend`](LoopStep::attend) and [`route`](LoopStep::route), as a model
/// runs; where rows are to read the pages of their experts only ([`Read::Experts`]), `route` comes before
/// `attend`, from logits that exist before attention: of a gate over the layer's input, or those of the layer before. At the end [`commit`](LoopStep::commit): tokens that left the ring are
/// filed, policies get what was attended, hits and misses of each expert are counted where a router, a policy or the sink asks for them
/// ([`Hits`](crate::rules::Hits)), what is over the budgets is evicted, and the routers learn. Every stage can be called alone on [`Step`], [`Sequence`] and [`Router`].
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::policy::{Budget, Eviction, H2o};
/// use pikv::router::{CacheAware, Shape};
/// use pikv::rules::Hits;
/// use pikv::{Attend, Cache, CacheConfig, ClosedLoop, Dtype, LayerShape, Output};
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
///     step.attend(0, &[x; 8], &Attend::new(0.5), Output::new(&mut out))?;
///     let routes = step.route(0, &[x, -x, 0.5, 0.0])?;
///     assert_eq!(routes.model().experts.len(), 2);     // what the model mixes
///     step.commit()?;
/// }
/// assert_eq!(sequence.resident(0, 0)?.0, 12);
/// let report = looped.report();
/// assert!(report.misses(0).iter().sum::<f64>() > 0.0); // pages that the last row looked for and that are gone
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
    /// Routers as they are on the cache's device.
    devices: Devices,
    /// Whether a step is under way, or was leaked.
    open: bool,
    scratch: Scratch,
}

/// What a step needs meanwhile, kept for the next.
#[derive(Default)]
struct Scratch {
    /// First positions and rows of a step's sequences.
    starts: Vec<(Position, usize)>,
    /// Logits in f32, where they come in 16 bits.
    logits: Vec<f32>,
    /// Of each expert, over all layers.
    hits: Vec<f64>,
    misses: Vec<f64>,
    /// Of each expert of a layer, 32nds of pages: wanted, and missed.
    parts: [Vec<u64>; 2],
    /// The same as a router takes them.
    wanted: Vec<u32>,
    missed: Vec<u32>,
}

impl std::fmt::Debug for ClosedLoop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClosedLoop").field("cache", &self.cache).field("routers", &self.routers).finish()
    }
}

impl ClosedLoop {
    /// A loop over `cache`, with a router for each layer.
    ///
    /// # Errors
    /// Not as many routers as layers, or one of other experts than the cache's.
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
        #[allow(clippy::default_constructed_unit_structs, reason = "a unit without CUDA")]
        let (devices, scratch) = (Devices::default(), Scratch::default());
        Ok(ClosedLoop { cache, routers, sink, routes, report, learnt, devices, open: false, scratch })
    }

    /// Tells `sink` of every step.
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

    /// The routers, to look at their states ([`ClosedLoop::save`] writes them): as if tokens that were taken back since had never been routed.
    pub fn routers(&mut self) -> &[Box<dyn Router>] {
        self.routers_mut()
    }

    /// The routers, to restore their states.
    pub fn routers_mut(&mut self) -> &mut [Box<dyn Router>] {
        // A router that refuses to go back is told by the step that begins next, if it still does.
        let _ = self.learnt.forget(&mut self.routers);
        &mut self.routers
    }

    /// Steps that are kept because tokens of them can be taken back: at most as many as a sequence can take tokens back, and 64 and four
    /// for each such token where a sequence stands still.
    pub fn kept_steps(&self) -> usize {
        self.learnt.steps()
    }

    /// What the last step that was committed met.
    pub fn report(&self) -> &StepReport {
        &self.report
    }

    /// Starts a step, as [`Cache::begin`]. Before it the routers forget tokens that were taken back since they learnt from them, as far
    /// as the cache's rollback reaches ([`CacheConfig::rollback`](crate::CacheConfig::rollback)) and a fork does not have them still: as
    /// if they had never been routed, to the bit where their sequence was alone in its steps. Of a step that is taken back in part, pages
    /// count as the whole step met them.
    ///
    /// # Errors
    /// Those of [`Cache::begin`]; [`LoopError::Route`] for a router that refuses to go back to an earlier state of its own: it goes on
    /// with what it has learnt.
    pub fn begin<'a>(
        &'a mut self,
        parts: impl IntoIterator<Item = (&'a mut Sequence, u32)>,
    ) -> Result<LoopStep<'a>, LoopError> {
        let step = self.cache.begin(parts)?;
        if std::mem::replace(&mut self.open, true) {
            // A step was leaked instead of dropped.
            self.routers.iter_mut().for_each(forget);
        }
        self.devices.forget();
        let forgotten = self.learnt.forget(&mut self.routers);
        forgotten.map_err(|(layer, source)| LoopError::Route { layer, source })?;
        self.learnt.begin(self.routers.len(), step.parts());
        self.routes.iter_mut().for_each(Routes::clear);
        Ok(LoopStep { step: Some(step), of: self })
    }
}

/// A step of a [`ClosedLoop`]. Dropped without a commit it never happened, for the routers either.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::router::{Shape, TopK};
/// use pikv::{Attend, Cache, CacheConfig, ClosedLoop, Dtype, LayerShape, Output, Read};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).experts(4, 2))?;
/// let router = TopK::default().router(Shape::new(4, 2))?;
/// let mut looped = ClosedLoop::new(cache.clone(), vec![Box::new(router)])?;
/// let mut sequence = cache.sequence();
/// let mut step = looped.begin([(&mut sequence, 1)])?;
/// step.route(0, &[0.1, 0.9, 0.3, -1.0])?;                 // before attend, as rows read their experts' pages
/// step.append(0, &[0.5; 4], &[0.25; 4])?;
/// step.attend(0, &[1.0; 8], &Attend::new(0.5).read(Read::Experts), Output::new(&mut [0.0; 8]))?;
/// step.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LoopStep<'a> {
    /// `None` once it was committed.
    step: Option<Step<'a>>,
    of: &'a mut ClosedLoop,
}

impl<'a> LoopStep<'a> {
    fn step(&mut self) -> &mut Step<'a> {
        match &mut self.step {
            Some(step) => step,
            None => unreachable!("a commit takes the whole"),
        }
    }

    /// As [`Step::append`].
    ///
    /// # Errors
    /// Those of [`Step::append`].
    pub fn append(&mut self, layer: usize, k: &[impl Scalar], v: &[impl Scalar]) -> Result<(), LoopError> {
        Ok(self.step().append(layer, k, v)?)
    }

    /// As [`Step::append_device`].
    ///
    /// # Errors
    /// Those of [`Step::append_device`].
    pub fn append_device(&mut self, layer: usize, k: DeviceSlice, v: DeviceSlice) -> Result<(), LoopError> {
        Ok(self.step().append_device(layer, k, v)?)
    }

    /// As [`Step::leave_out`], for routers too: as if the sequence's rows had never been routed. What they chose for the others stays.
    /// Its rows stay in logits and [`Routes`], where they are zeros from then on.
    ///
    /// # Errors
    /// Those of [`Step::leave_out`]; [`Error::HostTensors`] after [`route_device`](LoopStep::route_device), as a device counts what it
    /// chose for all rows: the sequence is in the step still. [`LoopError::Route`] for a router that refuses rows that it took before: the
    /// sequence is left out, and that router has forgotten what it chose in the step.
    ///
    /// # Panics
    /// If a router does. The sequence is left out, and that router has forgotten what it chose in the step.
    pub fn leave_out(&mut self, sequence: usize) -> Result<(), LoopError> {
        let Some(step) = &mut self.step else { unreachable!("a commit takes the whole") };
        let ClosedLoop { routers, learnt, devices, .. } = &mut *self.of;
        if let Some(layer) = (0..routers.len()).find(|layer| devices.has_chosen(*layer)) {
            let what = "leaving a sequence out of a step whose experts the device has ranked";
            return Err(LoopError::Cache(Error::HostTensors { layer, what }));
        }
        let known = step.live_rows();
        step.leave_out(sequence)?;
        if !(1..known).contains(&step.live_rows()) {
            // It had left before; or all have, and nothing is learnt.
            return Ok(());
        }
        let left = learnt.leave_out(sequence, routers);
        left.map_err(|(layer, source)| LoopError::Route { layer, source })
    }

    /// Ranks the experts of the step's rows from the gate's logits, `[rows][experts]` in f32, f16 or bf16 ([`Scalar`]), and files the rows by
    /// them. The model's own choice and its weights are in [`Routes::model`]. Routers take f32: logits in 16 bits are widened into a list of
    /// the loop's, 4 bytes a row and expert of the largest step.
    ///
    /// # Errors
    /// No such layer, one that was already routed, or what the router refuses.
    pub fn route(&mut self, layer: usize, logits: &[impl Scalar]) -> Result<&Routes, LoopError> {
        self.route_slice(layer, HostSlice::of(logits))
    }

    fn route_slice(&mut self, layer: usize, logits: HostSlice<'_>) -> Result<&Routes, LoopError> {
        let Some(step) = &mut self.step else { unreachable!("a commit takes the whole") };
        let ClosedLoop { cache, routers, routes, learnt, devices, scratch, .. } = &mut *self.of;
        let Some(router) = routers.get_mut(layer) else {
            return Err(LoopError::Cache(Error::Layer { layer, layers: routes.len() }));
        };
        let Scratch { starts, logits: wide, .. } = scratch;
        starts.clear();
        starts.extend(step.parts());
        if step.routed(layer) || devices.is_pending(layer) {
            return Err(LoopError::Cache(Error::Twice { layer, what: "routed" }));
        }
        let refused = |source| LoopError::Route { layer, source };
        let experts = cache.config().experts as usize;
        let rows: usize = starts.iter().map(|(_, rows)| rows).sum();
        let (got, expected) = (logits.len(), rows * experts);
        if got != expected {
            let what = "logits";
            return Err(LoopError::Cache(Error::Length { what, got, expected, shape: "rows * experts" }));
        }
        let logits = logits.wide(wide);
        let routes = &mut routes[layer];
        routes.clear();
        // What a router that panics or refuses has counted is forgotten, as the layer can be routed again.
        let chosen = catch_unwind(AssertUnwindSafe(|| {
            let mut rest = logits;
            if step.live_rows() == 0 {
                return Ok(());
            }
            // Rows that stay are learnt before the state is noted that the others are learnt from.
            let firm = learnt.firm();
            if let (1.., [(first, rows)]) = (firm, &mut starts[..]) {
                let (own, others) = rest.split_at(firm * experts);
                rest = others;
                router.route(*first, own, routes)?;
                (*first, *rows) = (Position(first.0 + firm as u32), *rows - firm);
            }
            let own = starts.iter().enumerate().filter_map(|(sequence, (first, rows))| {
                let (own, others) = rest.split_at(rows * experts);
                rest = others;
                (!step.is_out(sequence)).then_some((*first, own))
            });
            let own: SmallVec<[(Position, &[f32]); 8]> = own.collect();
            learnt.routing(layer, router.as_ref(), own.iter().map(|(_, logits)| *logits));
            own.into_iter().try_for_each(|(first, logits)| router.route(first, logits, routes))
        }));
        let filed = match chosen {
            Ok(Ok(())) => {
                routes.spread(step.gaps(), cache.config().top_k as usize);
                step.route(layer, &routes.filing().experts).map_err(LoopError::Cache)
            }
            Ok(Err(source)) => Err(refused(source)),
            Err(panic) => {
                forget(router);
                resume_unwind(panic)
            }
        };
        if let Err(error) = filed {
            forget(router);
            return Err(error);
        }
        let (more, counts) = routes.more();
        step.fetch(layer, routes.fetch() as u32, more, counts);
        Ok(routes)
    }

    /// As [`Step::attend`]. Where rows read the pages of their experts only, they read those of as many as the router would fetch.
    ///
    /// # Errors
    /// Those of [`Step::attend`].
    pub fn attend(
        &mut self,
        layer: usize,
        q: &[impl Scalar],
        options: &Attend,
        out: Output<'_>,
    ) -> Result<(), LoopError> {
        self.settle_to_read(layer, options)?;
        Ok(self.step().attend(layer, q, options, out)?)
    }

    /// As [`Step::attend_device`], and as [`attend`](LoopStep::attend).
    ///
    /// # Errors
    /// Those of [`Step::attend_device`].
    pub fn attend_device(
        &mut self,
        layer: usize,
        q: DeviceSlice,
        options: &Attend,
        out: DeviceOutput,
    ) -> Result<(), LoopError> {
        self.settle_to_read(layer, options)?;
        Ok(self.step().attend_device(layer, q, options, out)?)
    }

    /// As [`Step::check`], and of logits that were given on the device ([`route_device`](LoopStep::route_device)), which are judged last.
    ///
    /// # Errors
    /// Those of [`Step::check`]; [`LoopError::Route`] for a logit that is not finite.
    pub fn check(&mut self) -> Result<(), LoopError> {
        self.step().check()?;
        self.settle_all()
    }

    /// As [`Step::reads`].
    ///
    /// # Errors
    /// Those of [`Step::reads`].
    pub fn reads(&mut self, sequence: usize, read: Read) -> Result<(), LoopError> {
        Ok(self.step().reads(sequence, read)?)
    }

    /// As [`Step::closes_gaps`].
    ///
    /// # Errors
    /// Those of [`Step::closes_gaps`].
    pub fn closes_gaps(&mut self, sequence: usize, on: bool) -> Result<(), LoopError> {
        Ok(self.step().closes_gaps(sequence, on)?)
    }

    /// Waits for what the device chose for a layer, if rows are to read the pages of their experts.
    fn settle_to_read(&mut self, layer: usize, options: &Attend) -> Result<(), LoopError> {
        let any = self.step().reads_of(options).any(|read| read == Read::Experts);
        if any { self.settle(layer) } else { Ok(()) }
    }

    /// Waits for what the device chose for all layers.
    fn settle_all(&mut self) -> Result<(), LoopError> {
        // What came last is there last: the first wait is for all.
        self.of.devices.wait()?;
        (0..self.of.routers.len()).try_for_each(|layer| self.settle(layer))
    }

    /// Makes the tokens part of their sequences, evicts what is over the budgets, lets the routers learn, and tells the sink.
    ///
    /// # Errors
    /// Those of [`Step::commit`]; [`LoopError::Route`] for a logit on the device that is not finite; [`LoopError::Committed`] if a router refuses to learn, after all others and the sink were told.
    ///
    /// # Panics
    /// If a policy does, as [`Step::commit`]: routers learn nothing of the step then. If a router does, after all others and the sink were
    /// told; the step is committed. If the sink does; the step is committed, and the routers have learnt.
    pub fn commit(mut self) -> Result<(), LoopError> {
        self.settle_all()?;
        self.of.report.unasked = !self.of.sink.wants_reused();
        let Some(step) = self.step.take() else { return Ok(()) };
        let rows = step.live_rows() as u64;
        if rows == 0 {
            // As if there had been no step.
            return Ok(());
        }
        step.commit_with(&mut self.of.report)?;
        self.of.open = false;
        let (mut refused, mut panicked) = (Ok(()), None);
        let ClosedLoop { cache, routers, sink, routes, report, learnt, devices, scratch, .. } = &mut *self.of;
        let Scratch {
            hits: all_hits, misses: all_misses, parts: [both, gone], wanted: asked, missed, ..
        } = scratch;
        for sums in [&mut *all_hits, &mut *all_misses] {
            sums.clear();
            sums.resize(report.experts, 0.0);
        }
        for (layer, router) in routers.iter_mut().enumerate() {
            let (hits, misses) = (report.hits(layer), report.misses(layer));
            let parts = |pages: f64| (pages * f64::from(PAGE)) as u64;
            both.clear();
            both.extend(hits.iter().zip(misses).map(|(hit, miss)| parts(hit + miss)));
            gone.clear();
            gone.extend(misses.iter().map(|miss| parts(*miss)));
            narrow(both, gone, asked, missed);
            if let Some(ByPart { met, .. }) = &report.by_part {
                let of =
                    met.partition_point(|(l, ..)| *l < layer)..met.partition_point(|(l, ..)| *l <= layer);
                let met = met[of].iter().map(|(_, part, met)| (*part, *met));
                learnt.met(layer, report.experts, met, report.remote_bytes(layer));
            }
            // A layer without rows has nothing to tell.
            if routes[layer].rows() > 0 {
                let remote = report.remote_bytes(layer);
                let feedback = Feedback::new(asked, missed).of_page(PAGE).remote_bytes(remote);
                let told = catch_unwind(AssertUnwindSafe(|| router.observe(&feedback)));
                match told {
                    Ok(Ok(())) => devices.learn(layer, router.as_ref(), asked, missed),
                    _ => forget(router),
                }
                match told {
                    Ok(told) => {
                        refused = refused.and(told.map_err(|source| LoopError::Committed { layer, source }));
                    }
                    Err(panic) => panicked = panicked.or(Some(panic)),
                }
            }
            all_hits.iter_mut().zip(hits).for_each(|(sum, n)| *sum += n);
            all_misses.iter_mut().zip(misses).for_each(|(sum, n)| *sum += n);
        }
        if let Some(by_part) = &mut report.by_part {
            learnt.committed(&mut by_part.tickets);
        }
        let near: u64 = cache.inner.pool.arenas.bytes_by_shard().sum();
        let resident_bytes = near + cache.inner.fabric.as_ref().map_or(0, |front| front.held());
        let logical_bytes = report.logical_bytes;
        let [held_tokens, lost_tokens] = [&report.held, &report.lost].map(|of| of.iter().sum());
        let (hits, misses) = (&**all_hits, &**all_misses);
        sink.step(&StepMetrics {
            rows,
            resident_bytes,
            logical_bytes,
            hits,
            misses,
            held_tokens,
            lost_tokens,
        });
        report.evicted.iter().for_each(|page| sink.evicted(page));
        report.reused.iter().for_each(|page| sink.reused(page));
        sink.failures(&cache.failures());
        if let Some(front) = &cache.inner.fabric {
            sink.traffic(&front.traffic());
        }
        match panicked {
            Some(panic) => resume_unwind(panic),
            None => refused,
        }
    }
}

/// Has a router forget what it chose since it last learnt. If it panics there is nothing more that can be done about it, and the caller
/// may be unwinding.
fn forget(router: &mut Box<dyn Router>) {
    let _ = catch_unwind(AssertUnwindSafe(|| router.discard()));
}

impl Drop for LoopStep<'_> {
    fn drop(&mut self) {
        // The step itself undoes what it did to the sequences.
        // Nor have the routers chosen anything in it.
        if std::mem::take(&mut self.of.open) {
            self.of.routers.iter_mut().for_each(forget);
            self.of.devices.forget();
        }
    }
}
