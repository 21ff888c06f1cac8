//! A step of a closed loop: routers choose experts, and learn from hits and misses at the commit.

use super::learnt::narrow;
use super::{ClosedLoop, LoopError, Scratch, forget};
use crate::attend::options::{Attend, AttendOutput, ReadPages};
use crate::base::device_slice::{DeviceOutput, DeviceSlice};
use crate::base::error::Error;
use crate::base::host_slice::{HostSlice, Scalar};
use crate::cache::step::Step;
use crate::metrics::StepMetrics;
use crate::metrics::report::ByPart;
use crate::router::{PageFeedback, Routes};
use pikv_core::page::{PAGE, Position};
use smallvec::SmallVec;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A step of a [`ClosedLoop`]. Dropping it without a commit leaves sequences and routers unchanged.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::router::{Shape, TopK};
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, LayerShape, ReadPages};
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
/// step.attend(0, &[1.0; 8], &Attend::new(0.5).read(ReadPages::Experts), AttendOutput::new(&mut [0.0; 8]))?;
/// step.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LoopStep<'a> {
    /// `None` after the commit.
    pub(super) step: Option<Step<'a>>,
    pub(super) of: &'a mut ClosedLoop,
}

impl<'a> LoopStep<'a> {
    pub(super) fn step(&mut self) -> &mut Step<'a> {
        match &mut self.step {
            Some(step) => step,
            None => unreachable!("a commit takes the whole"),
        }
    }

    /// Calls [`Step::append`].
    ///
    /// # Errors
    /// The errors of [`Step::append`].
    pub fn append(&mut self, layer: usize, k: &[impl Scalar], v: &[impl Scalar]) -> Result<(), LoopError> {
        Ok(self.step().append(layer, k, v)?)
    }

    /// Calls [`Step::append_device`].
    ///
    /// # Errors
    /// The errors of [`Step::append_device`].
    pub fn append_device(&mut self, layer: usize, k: DeviceSlice, v: DeviceSlice) -> Result<(), LoopError> {
        Ok(self.step().append_device(layer, k, v)?)
    }

    /// Calls [`Step::leave_out`], and makes the routers forget the sequence's rows. Choices for other rows stay. The sequence keeps its
    /// rows in logits and [`Routes`]; in `Routes` they are zero from then on.
    ///
    /// # Errors
    /// The errors of [`Step::leave_out`]; [`Error::HostTensors`] after [`route_device`](LoopStep::route_device), since a device router
    /// counts its choices for all rows together: the sequence stays in the step. [`LoopError::Route`] for a router that refuses rows that
    /// it accepted before: the sequence is left out, and that router has forgotten its choices in the step.
    ///
    /// # Panics
    /// If a router panics. The sequence is left out, and that router has forgotten its choices in the step.
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
            // The sequence was left out before, or none is left and nothing is learnt.
            return Ok(());
        }
        let left = learnt.leave_out(sequence, routers);
        left.map_err(|(layer, source)| LoopError::Route { layer, source })
    }

    /// Ranks the experts of the step's rows from the gate's logits, `[rows][experts]` in f32, f16 or bf16 ([`Scalar`]), and files the rows
    /// under them. [`Routes::model`] has the model's own choice and its weights. Logits in 16 bits are widened to f32 in a buffer of the
    /// loop: 4 bytes for each row and expert of the largest step.
    ///
    /// # Errors
    /// [`Error::Layer`]; [`Error::Twice`] for a layer already routed; [`Error::Length`]; [`LoopError::Route`] for an error of the router.
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
        // If the router panics or fails it forgets its counts, as the layer can be routed again.
        let chosen = catch_unwind(AssertUnwindSafe(|| {
            let mut rest = logits;
            if step.live_rows() == 0 {
                return Ok(());
            }
            // Rows out of reach of a rollback are routed first, before the state is saved from which the other rows can be learnt again.
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

    /// Calls [`Step::attend`]. With [`ReadPages::Experts`], a row reads the pages of [`Routes::fetch`] experts.
    ///
    /// # Errors
    /// The errors of [`Step::attend`].
    pub fn attend(
        &mut self,
        layer: usize,
        q: &[impl Scalar],
        options: &Attend,
        out: AttendOutput<'_>,
    ) -> Result<(), LoopError> {
        self.take_choices_to_read(layer, options)?;
        Ok(self.step().attend(layer, q, options, out)?)
    }

    /// Calls [`Step::attend_device`]; with [`ReadPages::Experts`] as [`attend`](LoopStep::attend).
    ///
    /// # Errors
    /// The errors of [`Step::attend_device`].
    pub fn attend_device(
        &mut self,
        layer: usize,
        q: DeviceSlice,
        options: &Attend,
        out: DeviceOutput,
    ) -> Result<(), LoopError> {
        self.take_choices_to_read(layer, options)?;
        Ok(self.step().attend_device(layer, q, options, out)?)
    }

    /// Calls [`Step::check`], then checks logits given on the device ([`route_device`](LoopStep::route_device)).
    ///
    /// # Errors
    /// The errors of [`Step::check`]; [`LoopError::Route`] for a logit that is not finite.
    pub fn check(&mut self) -> Result<(), LoopError> {
        self.step().check()?;
        self.take_all_choices()
    }

    /// Calls [`Step::set_read`].
    ///
    /// # Errors
    /// The errors of [`Step::set_read`].
    pub fn set_read(&mut self, sequence: usize, read: ReadPages) -> Result<(), LoopError> {
        Ok(self.step().set_read(sequence, read)?)
    }

    /// Calls [`Step::set_closed_gaps`].
    ///
    /// # Errors
    /// The errors of [`Step::set_closed_gaps`].
    pub fn set_closed_gaps(&mut self, sequence: usize, on: bool) -> Result<(), LoopError> {
        Ok(self.step().set_closed_gaps(sequence, on)?)
    }

    /// Waits for the device's choices for a layer, if rows read by [`ReadPages::Experts`].
    fn take_choices_to_read(&mut self, layer: usize, options: &Attend) -> Result<(), LoopError> {
        let any = self.step().reads_of(options).any(|read| read == ReadPages::Experts);
        if any { self.take_choices(layer) } else { Ok(()) }
    }

    /// Waits for the device's choices for all layers.
    fn take_all_choices(&mut self) -> Result<(), LoopError> {
        // One wait for the last layer covers the earlier ones.
        self.of.devices.wait()?;
        (0..self.of.routers.len()).try_for_each(|layer| self.take_choices(layer))
    }

    /// Makes the tokens part of their sequences, evicts tokens over the budgets, lets the routers learn, and passes metrics to the sink.
    ///
    /// # Errors
    /// The errors of [`Step::commit`]; [`LoopError::Route`] for a logit on the device that is not finite; [`LoopError::Committed`] if a
    /// router fails to learn, after all other routers and the sink were called.
    ///
    /// # Panics
    /// If a policy panics, as [`Step::commit`]: routers then learn nothing of the step. If a router panics: after all other routers and the
    /// sink were called; the step is committed. If the sink panics: the step is committed, and the routers have learnt.
    pub fn commit(mut self) -> Result<(), LoopError> {
        self.take_all_choices()?;
        self.of.report.unasked = !self.of.sink.wants_reused();
        let Some(step) = self.step.take() else { return Ok(()) };
        let rows = step.live_rows() as u64;
        if rows == 0 {
            // Commits nothing.
            return Ok(());
        }
        step.commit_with(&mut self.of.report)?;
        self.of.open = false;
        let (refused, panicked) = self.of.learn();
        self.of.tell_sink(rows);
        match panicked {
            Some(panic) => resume_unwind(panic),
            None => refused,
        }
    }
}

impl ClosedLoop {
    /// Lets each router learn from the hits and misses of the step; a router that fails or panics forgets its choices. Returns the first
    /// error and the first panic. Sums hits and misses over the layers.
    fn learn(&mut self) -> (Result<(), LoopError>, Option<Box<dyn Any + Send>>) {
        let (mut refused, mut panicked) = (Ok(()), None);
        let ClosedLoop { routers, routes, report, learnt, devices, scratch, .. } = self;
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
            // A layer without rows gives no feedback.
            if routes[layer].rows() > 0 {
                let remote = report.remote_bytes(layer);
                let feedback = PageFeedback::new(asked, missed).of_page(PAGE).remote_bytes(remote);
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
        (refused, panicked)
    }

    /// Reports a committed step of `rows` rows to the sink.
    fn tell_sink(&self, rows: u64) {
        let ClosedLoop { cache, sink, report, scratch, .. } = self;
        let near: u64 = cache.inner.pool.arenas.bytes_by_shard().sum();
        let resident_bytes = near + cache.inner.fabric.as_ref().map_or(0, |front| front.held());
        let logical_bytes = report.logical_bytes;
        let [held_tokens, lost_tokens] = [&report.held, &report.lost].map(|of| of.iter().sum());
        let Scratch { hits, misses, .. } = scratch;
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
    }
}

impl Drop for LoopStep<'_> {
    fn drop(&mut self) {
        // Dropping the inner step undoes the changes to the sequences; the routers forget their choices here.
        if std::mem::take(&mut self.of.open) {
            self.of.routers.iter_mut().for_each(forget);
            self.of.devices.forget();
        }
    }
}
