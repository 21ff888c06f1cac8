//! Routing from logits of the device.

use super::{ClosedLoop, LoopError, LoopStep};
use crate::base::device_slice::{DeviceRoutes, DeviceSlice};
use crate::base::error::Error;

/// Routing from the gate's logits where they lie: the device ranks the experts, and the host waits for nothing.
impl LoopStep<'_> {
    /// As [`route`](LoopStep::route), from logits in memory of the cache's device, `[rows][experts]` in f32. The experts and their weights
    /// are left in memory of the device, for the engine's own kernels; choices, weights and what the router learns have the bits of the
    /// host's. All is put on the back end's stream, in the order of the calls: a launch, one more where the router averages the gate's entropy (two
    /// in a step with rows that no rollback reaches), and copies.
    ///
    /// Nothing is waited for here. The choices are on their way to the host, whose page tables file tokens by them, and the wait for them is
    /// in [`commit`](LoopStep::commit), or in [`check`](LoopStep::check) if that is called, once for all layers. Two things move it forward:
    /// an `attend` of the layer with [`Read::Experts`](crate::Read::Experts), which waits for the layer's choices, as the host lists the pages;
    /// and a step of more rows than any before, for which memory grows. A router is kept on the device beside the host's: the first step
    /// writes it there, and so does one after the host's was restored, rolled back, or routed by itself. From then on each learns by itself,
    /// and a step sends up what pages it wanted and missed, of routers that learn from misses, and positions, of R_B. With a
    /// [`rollback`](crate::CacheConfig::rollback) the logits come down too, as routers learn again what is left of a step.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::closed_loop::{LoopError, LoopStep};
    /// use pikv::{Dtype, cuda::DeviceSlice};
    ///
    /// fn layer(step: &mut LoopStep<'_>, layer: usize, gate: u64, rows: usize) -> Result<u64, LoopError> {
    ///     // SAFETY: `gate` is a tensor [rows][experts] of the engine's, written on the same stream.
    ///     let logits = unsafe { DeviceSlice::new(gate, rows * 64, Dtype::F32) };
    ///     let routes = step.route_device(layer, logits)?;
    ///     Ok(routes.model.experts)               // [rows][top_k] u32, for the kernel that mixes experts
    /// }
    /// ```
    ///
    /// # Errors
    /// No such layer, one that was already routed, logits of another length; [`Error::HostTensors`] for a cache on the CPU, and once a sequence
    /// was [left out](LoopStep::leave_out);
    /// [`Error::DeviceTensor`] for logits that are not f32, and as [`append_device`](LoopStep::append_device); a device that fails.
    /// [`LoopError::Route`] with [`RouteError::HostOnly`](crate::router::RouteError::HostOnly) for a router that chooses on the host only: one of
    /// your own, and R_E with [`more`](crate::router::EntropyPenalised#structfield.more). R_A draws its arm on the host, in `commit`, and
    /// needs no wait for it. A logit that is not finite is found later, by `check` or `commit`, with the error of `route`; the row's experts
    /// mean nothing then, and the step can only be dropped.
    pub fn route_device(&mut self, layer: usize, logits: DeviceSlice) -> Result<DeviceRoutes, LoopError> {
        let Some(step) = &mut self.step else { unreachable!("a commit takes the whole") };
        let layers = self.of.routers.len();
        if layer >= layers {
            return Err(LoopError::Cache(Error::Layer { layer, layers }));
        }
        if step.routed(layer) || self.of.devices.is_pending(layer) {
            return Err(LoopError::Cache(Error::Twice { layer, what: "routed" }));
        }
        let (got, expected) = (logits.len(), step.rows() * self.of.cache.config().experts as usize);
        if got != expected {
            let what = "logits";
            return Err(LoopError::Cache(Error::Length { what, got, expected, shape: "rows * experts" }));
        }
        if step.any_out() {
            let what = "a step that a sequence was left out of";
            return Err(LoopError::Cache(Error::HostTensors { layer, what }));
        }
        let starts = &mut self.of.scratch.starts;
        starts.clear();
        starts.extend(step.parts());
        self.of.devices_route(layer, logits)
    }
}

#[cfg(not(feature = "cuda"))]
mod without {
    use super::*;

    /// No device.
    #[derive(Debug, Default)]
    pub(in crate::closed_loop) struct Devices;

    impl Devices {
        pub fn is_pending(&self, _: usize) -> bool {
            false
        }

        pub fn has_chosen(&self, _: usize) -> bool {
            false
        }

        pub fn forget(&mut self) {}

        pub fn wait(&self) -> Result<(), Error> {
            Ok(())
        }

        pub fn learn(&mut self, _: usize, _: &dyn crate::router::Router, _: &[u32], _: &[u32]) {}
    }

    impl ClosedLoop {
        pub(super) fn devices_route(
            &mut self,
            layer: usize,
            _: DeviceSlice,
        ) -> Result<DeviceRoutes, LoopError> {
            Err(LoopError::Cache(Error::HostTensors { layer, what: "a cache on the CPU" }))
        }
    }

    impl LoopStep<'_> {
        pub(in crate::closed_loop) fn settle(&mut self, _: usize) -> Result<(), LoopError> {
            Ok(())
        }
    }
}
#[cfg(not(feature = "cuda"))]
pub(super) use without::Devices;

#[cfg(feature = "cuda")]
mod with {
    use super::*;
    use crate::closed_loop::forget;
    use crate::route_cuda::{Batch, Brought, OnDevice, Pending};
    use crate::router::{RouteError, Router};
    use pikv_core::page::Position;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    /// Routers of layers as they are on the device, from their first use on.
    #[derive(Debug, Default)]
    pub(in crate::closed_loop) struct Devices {
        layers: Vec<Option<OnDevice>>,
        /// Which of them chose in the step under way.
        chose: Vec<bool>,
        chosen: Vec<u16>,
    }

    impl Devices {
        pub fn is_pending(&self, layer: usize) -> bool {
            self.layers.get(layer).and_then(Option::as_ref).is_some_and(OnDevice::is_pending)
        }

        /// Whether it chose in the step under way.
        pub fn has_chosen(&self, layer: usize) -> bool {
            self.chose.get(layer).is_some_and(|chose| *chose)
        }

        /// Waits for the choices of all layers, of the last ones first.
        ///
        /// # Errors
        /// The device.
        pub fn wait(&self) -> Result<(), Error> {
            self.layers.iter().rev().flatten().try_for_each(OnDevice::wait)
        }

        /// Forgets a step that is not committed.
        pub fn forget(&mut self) {
            self.layers.iter_mut().flatten().for_each(OnDevice::forget);
            self.chose.fill(false);
        }

        /// A router of the host has learnt; the device learns the same, if it chose. Where it cannot, what it holds is written anew before
        /// it is used: nothing is lost by it, and a device that fails says so at its next call.
        pub fn learn(&mut self, layer: usize, router: &dyn Router, wanted: &[u32], missed: &[u32]) {
            let Some(chose) = self.chose.get_mut(layer) else { return };
            if let (true, Some(on)) = (std::mem::take(chose), &mut self.layers[layer])
                && let Ok(plan) = router.device_plan()
            {
                let _ = on.learn(&plan, wanted, missed);
            }
        }
    }

    impl ClosedLoop {
        /// The rows are those of `scratch.starts`.
        pub(super) fn devices_route(
            &mut self,
            layer: usize,
            logits: DeviceSlice,
        ) -> Result<DeviceRoutes, LoopError> {
            let ClosedLoop { cache, routers, learnt, devices, scratch, .. } = self;
            let Some(device) = cache.config().backend.device() else {
                return Err(LoopError::Cache(Error::HostTensors { layer, what: "a cache on the CPU" }));
            };
            let router = &routers[layer];
            let plan = router.device_plan().map_err(|source| LoopError::Route { layer, source })?;
            devices.layers.resize_with(routers.len(), || None);
            devices.chose.resize(routers.len(), false);
            let on = match &mut devices.layers[layer] {
                Some(on) => on,
                none => none.insert(OnDevice::new(device, router.shape().experts)?),
            };
            let batch =
                Batch { logits, parts: &scratch.starts, firm: learnt.firm(), bring_logits: learnt.is_on() };
            let routes = on.route(&plan, &router.shape(), &batch)?;
            devices.chose[layer] = true;
            Ok(routes)
        }
    }

    /// The row of the call of [`Router::route`] that the host would make, of a row of the step.
    fn row_of_call(parts: impl Iterator<Item = (Position, usize)>, firm: usize, mut row: usize) -> usize {
        for rows in (firm > 0).then_some(firm).into_iter().chain(parts.map(|(_, rows)| rows)) {
            if row < rows {
                break;
            }
            row -= rows;
        }
        row
    }

    impl LoopStep<'_> {
        /// Waits for the choices that the device made for a layer, if it made some and they were not waited for, and files the rows by them.
        pub(in crate::closed_loop) fn settle(&mut self, layer: usize) -> Result<(), LoopError> {
            let on = self.of.devices.layers.get_mut(layer).and_then(Option::as_mut);
            let Some(pending) = on.and_then(OnDevice::take) else { return Ok(()) };
            let settled = pending.wait().map_err(LoopError::Cache);
            let settled = settled.and_then(|brought| self.take_in(layer, &pending, &brought));
            if let Some(on) = &self.of.devices.layers[layer] {
                on.put_back(pending);
            }
            settled
        }

        fn take_in(&mut self, layer: usize, of: &Pending, brought: &Brought<'_>) -> Result<(), LoopError> {
            let Some(step) = &mut self.step else { unreachable!("a commit takes the whole") };
            let ClosedLoop { routers, routes, learnt, devices, .. } = &mut *self.of;
            let router = &mut routers[layer];
            let shape = router.shape();
            let (experts, top_k) = (shape.experts as usize, shape.top_k as usize);
            if let Some((element, value)) = brought.fault {
                let row = row_of_call(step.parts(), of.firm, element / experts);
                let source = RouteError::Logit { row, expert: element % experts, value };
                return Err(LoopError::Route { layer, source });
            }
            let chosen = &mut devices.chosen;
            chosen.clear();
            chosen.extend(brought.chosen.iter().map(|expert| *expert as u16));
            let taken = catch_unwind(AssertUnwindSafe(|| {
                let (firm, others) = chosen.split_at(of.firm * top_k);
                if of.firm > 0 {
                    router.routed(firm, brought.firm_entropy)?;
                }
                learnt.routing(layer, router.as_ref(), std::iter::once(brought.logits));
                router.routed(others, brought.entropy)
            }));
            let filed = match taken {
                Ok(Ok(())) => step.route(layer, chosen).map_err(LoopError::Cache),
                Ok(Err(source)) => Err(LoopError::Route { layer, source }),
                Err(panic) => {
                    forget(router);
                    resume_unwind(panic)
                }
            };
            if filed.is_err() {
                forget(router);
                return filed;
            }
            routes[layer].brought(chosen, top_k, of.fetch);
            step.fetch(layer, of.fetch as u32, &[], &[]);
            Ok(())
        }
    }
}
#[cfg(feature = "cuda")]
pub(super) use with::Devices;
