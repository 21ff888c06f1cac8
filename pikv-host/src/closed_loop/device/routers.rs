//! States of the routers on the device, beside those on the host.

use crate::base::device_slice::{DeviceRoutes, DeviceSlice};
use crate::base::error::Error;
use crate::cache::Cache;
use crate::closed_loop::{ClosedLoop, LoopError, LoopStep, forget};
use crate::route_cuda::{self, Batch, Brought, DeviceRouter, PendingChoices};
use crate::router::{RouteError, Router};
use pikv_core::page::Position;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// States of the routers on the device, created at their first use.
#[derive(Debug, Default)]
pub(in crate::closed_loop) struct Devices {
    layers: Vec<Option<DeviceRouter>>,
    /// Whether the device chose the experts of each layer in the step under way.
    chose: Vec<bool>,
    chosen: Vec<u16>,
}

impl Devices {
    /// Without states; loads the kernels of routers that the cache's device can choose for.
    ///
    /// # Errors
    /// [`Error::Device`] if they do not load.
    pub fn new(cache: &Cache, routers: &[Box<dyn Router>]) -> Result<Devices, LoopError> {
        if let Some(device) = cache.config().backend.device() {
            let chosen = routers.iter().filter(|router| router.device_plan().is_ok());
            route_cuda::load(device, chosen.map(|router| router.shape().experts))
                .map_err(|error| LoopError::Cache(error.into()))?;
        }
        Ok(Devices::default())
    }

    pub fn is_pending(&self, layer: usize) -> bool {
        self.layers.get(layer).and_then(Option::as_ref).is_some_and(DeviceRouter::is_pending)
    }

    /// Whether the device chose the layer's experts in the step under way.
    pub fn has_chosen(&self, layer: usize) -> bool {
        self.chose.get(layer).is_some_and(|chose| *chose)
    }

    /// Waits for the choices of all layers, the last layer first.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn wait(&self) -> Result<(), Error> {
        self.layers.iter().rev().flatten().try_for_each(DeviceRouter::wait)
    }

    /// Forgets the choices of an uncommitted step.
    pub fn forget(&mut self) {
        self.layers.iter_mut().flatten().for_each(DeviceRouter::forget);
        self.chose.fill(false);
    }

    /// Lets the device's router learn what the host's has learnt, if it chose in this step. If that fails, the state is uploaded again
    /// before its next use, and a failing device returns an error at its next call.
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
    /// Routes the rows of `scratch.starts`.
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
            none => none.insert(DeviceRouter::new(device, router.shape().experts)?),
        };
        let batch =
            Batch { logits, parts: &scratch.starts, firm: learnt.firm(), bring_logits: learnt.is_on() };
        let routes = on.route(&plan, &router.shape(), &batch)?;
        devices.chose[layer] = true;
        Ok(routes)
    }
}

/// Converts a row of the step to a row of the [`Router::route`] call that the host would make for it.
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
    /// Waits for the device's choices for a layer, if any are pending, and files the rows under them.
    pub(in crate::closed_loop) fn take_choices(&mut self, layer: usize) -> Result<(), LoopError> {
        let on = self.of.devices.layers.get_mut(layer).and_then(Option::as_mut);
        let Some(pending) = on.and_then(DeviceRouter::take) else { return Ok(()) };
        let taken = pending.wait().map_err(LoopError::Cache);
        let taken = taken.and_then(|brought| self.take_in(layer, &pending, &brought));
        if let Some(on) = &self.of.devices.layers[layer] {
            on.put_back(pending);
        }
        taken
    }

    fn take_in(&mut self, layer: usize, of: &PendingChoices, brought: &Brought<'_>) -> Result<(), LoopError> {
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
