//! Where pages lie and are read: in the host's memory by its lanes, or on a CUDA device by its kernels.

use crate::base::error::CudaError;
#[cfg(feature = "cuda")]
use crate::device::Device;
use std::ffi::c_void;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Where a cache keeps its pages and attends. Results have the same bits.
///
/// A clone is the same device: caches built on it share its memory and its stream.
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
    #[cfg(feature = "cuda")]
    Cuda(Arc<Device>),
}

impl Backend {
    /// The host: [`Lanes`](pikv_lanes::Lanes) and its memory.
    pub const CPU: Backend = Backend(Kind::Cpu);

    /// The first CUDA device: [`Backend::cuda_device`] of 0.
    ///
    /// # Errors
    /// Why there is none.
    pub fn cuda() -> Result<Backend, CudaError> {
        Backend::cuda_device(0)
    }

    /// A CUDA device, by its number as the driver counts (`CUDA_VISIBLE_DEVICES` says which it counts). Loads the kernels, for its
    /// compute capability, into its primary context, which every call makes that of the calling thread: several devices can be used
    /// from one thread in turn, and from many.
    ///
    /// The driver's library is opened at run time: `libcuda.so.1`, or what the environment variable `PIKV_LIBCUDA` names when the
    /// first call of a process is made. With the feature `cuda` a program needs no driver until it calls this.
    ///
    /// All shards of a cache lie on the one device; [`InProcess::on`](crate::fabric::InProcess::on) spreads them over several. Policies
    /// run on the host, from the masses that attention hands out; those that read keys and values to rank tokens copy pages from the
    /// device for it.
    ///
    /// # Errors
    /// Why there is none; [`CudaError::Ordinal`] says how many there are.
    pub fn cuda_device(ordinal: u32) -> Result<Backend, CudaError> {
        #[cfg(feature = "cuda")]
        return Ok(Backend(Kind::Cuda(Arc::new(Device::open(ordinal)?))));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = ordinal;
            Err(CudaError::NotBuilt)
        }
    }

    /// As [`Backend::cuda_device`], with all work put on a stream of yours, in the order of the calls: what you put on it before a call
    /// is done before what the call puts there, and that before what you put on it later. This is how an engine whose tensors lie on
    /// the device ([`Step::append_device`](crate::Step::append_device)) orders its work against the cache's, without an event
    /// or a wait. `stream` is a `CUstream`, as `cudarc`'s `CudaStream::cu_stream` and others give it; null is the default stream.
    ///
    /// # Errors
    /// Those of [`Backend::cuda_device`].
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, and outlives every clone of the back end and every cache built on one. It
    /// is not being captured into a graph while a call is made.
    pub unsafe fn cuda_stream(ordinal: u32, stream: *mut c_void) -> Result<Backend, CudaError> {
        #[cfg(feature = "cuda")]
        // SAFETY: the caller's promise.
        return Ok(Backend(Kind::Cuda(Arc::new(unsafe { Device::open_on(ordinal, stream)? }))));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (ordinal, stream);
            Err(CudaError::NotBuilt)
        }
    }

    /// The stream that work is put on, a `CUstream`; `None` on the CPU. Whoever has another stream orders the two by events of the
    /// driver: `cuEventRecord` on one, `cuStreamWaitEvent` on the other. It lives as long as the back end.
    pub fn stream(&self) -> Option<*mut c_void> {
        match &self.0 {
            Kind::Cpu => None,
            #[cfg(feature = "cuda")]
            Kind::Cuda(device) => Some(device.stream()),
        }
    }

    /// CUDA devices that the driver counts, numbered from 0.
    ///
    /// # Errors
    /// Why there is none, as [`Backend::cuda_device`].
    pub fn cuda_devices() -> Result<u32, CudaError> {
        #[cfg(feature = "cuda")]
        return Device::count();
        #[cfg(not(feature = "cuda"))]
        return Err(CudaError::NotBuilt);
    }

    /// `"cpu"` or `"cuda"`.
    pub fn name(&self) -> &'static str {
        match self.0 {
            Kind::Cpu => "cpu",
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => "cuda",
        }
    }

    pub(crate) fn is_cpu(&self) -> bool {
        matches!(self.0, Kind::Cpu)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        match &self.0 {
            Kind::Cpu => None,
            Kind::Cuda(device) => Some(device),
        }
    }
}
