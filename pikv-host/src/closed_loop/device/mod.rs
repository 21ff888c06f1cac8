//! Routing from logits of the device.

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
