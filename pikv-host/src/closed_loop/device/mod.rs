//! Routing from logits on the device.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod routers;

#[cfg(not(feature = "cuda"))]
pub(super) use absent::Devices;
#[cfg(feature = "cuda")]
pub(super) use routers::Devices;

use super::{LoopError, LoopStep};
use crate::base::device_slice::{DeviceRoutes, DeviceSlice};
use crate::base::error::Error;

/// Routing from the gate's logits on the device: the device ranks the experts, and the host does not wait.
impl LoopStep<'_> {
    /// Routes as [`route`](LoopStep::route), from logits on the cache's device, `[rows][experts]` in f32. The experts and their weights
    /// stay on the device, for the engine's own kernels. Choices, weights and the router's state have the bits of the host's. All work is
    /// enqueued on the back end's stream, in the order of the calls: one launch, one more if the router averages the gate's entropy (two
    /// more in a step with rows that no rollback reaches), and copies.
    ///
    /// The call does not wait. The choices are copied to the host, which files tokens by them; [`commit`](LoopStep::commit), or an earlier
    /// [`check`](LoopStep::check), waits for them, once for all layers. Two calls wait earlier: an `attend` of the layer with
    /// [`ReadPages::Experts`](crate::ReadPages::Experts), since the host lists the pages to read, and a step with more rows than any before, which
    /// allocates memory. Each router has a state on the device beside the host's. The first step uploads it, and so does a step after the
    /// host's was restored, rolled back, or routed on the host. Otherwise both states learn separately; a step uploads only the pages
    /// wanted and missed, for routers that learn from misses, and positions, for R_B. With a [`rollback`](crate::CacheConfig::rollback) the
    /// logits are also copied to the host, since routers learn a partly rolled back step again.
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
    /// [`Error::Layer`]; [`Error::Twice`] for a layer already routed; [`Error::Length`]; [`Error::HostTensors`] for a cache on the CPU, and
    /// after a sequence was [left out](LoopStep::leave_out); [`Error::DeviceTensor`] for logits that are not f32, and as
    /// [`append_device`](LoopStep::append_device); [`Error::Device`]. [`LoopError::Route`] with
    /// [`RouteError::HostOnly`](crate::router::RouteError::HostOnly) for a router that chooses only on the host: custom routers, and R_E
    /// with [`more`](crate::router::EntropyPenalised#structfield.more). (R_A draws its arm on the host, in `commit`, without a wait.)
    /// `check` or `commit` reports a logit that is not finite, with the error of `route`; the experts of its row are then undefined, and
    /// the step can only be dropped.
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
