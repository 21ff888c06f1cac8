//! Where pages lie and attention runs: host memory and SIMD lanes, or a CUDA device and its kernels.

use crate::base::error::CudaError;
use crate::device::Device;
use std::ffi::c_void;
use std::sync::Arc;

/// Where a cache keeps its pages and runs attention. All back ends give the same bits.
///
/// Clones share one device: caches built on them share its memory and its stream.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Backend, Cache, CacheConfig, Dtype, LayerShape};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let backend = Backend::cuda().unwrap_or_else(|why| {
///     eprintln!("{why}; using the CPU");
///     Backend::CPU
/// });
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).backend(backend))?;
/// println!("{}", cache.config().backend.name());
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Backend(pub(crate) Kind);

#[derive(Clone, Debug, Default)]
pub(crate) enum Kind {
    #[default]
    Cpu,
    Cuda(Arc<Device>),
}

impl Backend {
    /// Host memory and [`Lanes`](pikv_lanes::Lanes).
    pub const CPU: Backend = Backend(Kind::Cpu);

    /// Opens the first CUDA device: [`Backend::cuda_device`] of 0.
    ///
    /// # Errors
    /// Errors of [`Backend::cuda_device`], such as [`CudaError::NotBuilt`] without the feature `cuda`.
    pub fn cuda() -> Result<Backend, CudaError> {
        Backend::cuda_device(0)
    }

    /// Opens a CUDA device by the driver's number (after `CUDA_VISIBLE_DEVICES`), and loads the kernels of full pages into its primary
    /// context; caches and loops load others when they are built. The driver compiles them, which takes seconds, unless its cache has
    /// them. Every call makes that context current on the calling thread, so a thread can use several devices in turn, and
    /// several threads can use one device.
    ///
    /// The driver's library is opened at run time: `libcuda.so.1`, or the path in the environment variable `PIKV_LIBCUDA` at the first
    /// call of the process. A program built with the feature `cuda` needs no driver until it calls this.
    ///
    /// All shards of a cache lie on this device; [`InProcess::on`](crate::fabric::InProcess::on) spreads them over several. Policies
    /// run on the host, on the attention masses that the device returns; a policy that ranks tokens by their keys or values copies
    /// those pages to the host.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] without the feature `cuda`; [`CudaError::Ordinal`] (with the number of devices) if there is no such device;
    /// [`CudaError::Module`] if the kernels do not load; errors of the driver.
    pub fn cuda_device(ordinal: u32) -> Result<Backend, CudaError> {
        Ok(Backend(Kind::Cuda(Arc::new(Device::open(ordinal)?))))
    }

    /// [`Backend::cuda_device`] on a stream of yours. All work of a call is ordered on `stream`: after the work that you
    /// enqueued before the call, and before the work that you enqueue after it. An engine with tensors on the device
    /// ([`Step::append_device`](crate::Step::append_device)) thus needs no event and no wait to order its work against the cache's.
    /// `stream` is a `CUstream`, such as `cudarc`'s `CudaStream::cu_stream`; null is the default stream.
    ///
    /// # Errors
    /// Errors of [`Backend::cuda_device`].
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, and outlives every clone of the back end and every cache built on one. It
    /// is not being captured into a graph during a call.
    pub unsafe fn cuda_stream(ordinal: u32, stream: *mut c_void) -> Result<Backend, CudaError> {
        // SAFETY: the caller's promise.
        Ok(Backend(Kind::Cuda(Arc::new(unsafe { Device::open_on(ordinal, stream)? }))))
    }

    /// The `CUstream` that work is enqueued on; `None` on the CPU. To order it against another stream, use the driver's events:
    /// `cuEventRecord` on one stream, `cuStreamWaitEvent` on the other. The stream lives as long as the back end.
    pub fn stream(&self) -> Option<*mut c_void> {
        match &self.0 {
            Kind::Cpu => None,
            Kind::Cuda(device) => Some(device.stream()),
        }
    }

    /// Number of CUDA devices that the driver reports; they are numbered from 0.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] without the feature `cuda`; errors of the driver.
    pub fn cuda_devices() -> Result<u32, CudaError> {
        Device::count()
    }

    /// `"cpu"` or `"cuda"`.
    pub fn name(&self) -> &'static str {
        match self.0 {
            Kind::Cpu => "cpu",
            Kind::Cuda(_) => "cuda",
        }
    }

    pub(crate) fn is_cpu(&self) -> bool {
        matches!(self.0, Kind::Cpu)
    }

    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        match &self.0 {
            Kind::Cpu => None,
            Kind::Cuda(device) => Some(device),
        }
    }
}
