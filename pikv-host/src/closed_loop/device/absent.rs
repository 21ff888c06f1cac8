//! Stub for builds without the feature `cuda`: routing from logits on a device is refused.

use crate::base::device_slice::{DeviceRoutes, DeviceSlice};
use crate::base::error::Error;
use crate::cache::Cache;
use crate::closed_loop::{ClosedLoop, LoopError, LoopStep};
use crate::router::Router;

/// Never holds a device.
#[derive(Debug)]
pub(in crate::closed_loop) struct Devices;

impl Devices {
    pub fn new(_: &Cache, _: &[Box<dyn Router>]) -> Result<Devices, LoopError> {
        Ok(Devices)
    }

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

    pub fn learn(&mut self, _: usize, _: &dyn Router, _: &[u32], _: &[u32]) {}
}

impl ClosedLoop {
    pub(super) fn devices_route(&mut self, layer: usize, _: DeviceSlice) -> Result<DeviceRoutes, LoopError> {
        Err(LoopError::Cache(Error::HostTensors { layer, what: "a cache on the CPU" }))
    }
}

impl LoopStep<'_> {
    pub(in crate::closed_loop) fn take_choices(&mut self, _: usize) -> Result<(), LoopError> {
        Ok(())
    }
}
