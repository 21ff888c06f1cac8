//! The CUDA back end: for each device its primary context, the kernels, and their memory.
//!
//! All work of a cache is enqueued on one stream, in order, except copies of pages from lower tiers, which have a stream of their own. The
//! host waits only for results that it reads. Uploads use a ring of pinned memory, guarded by events. Buffers only
//! grow, so a step of a size that was seen before allocates nothing.

pub mod driver;
pub mod kernels;
pub mod memory;
pub mod modules;
pub mod pinned_copies;
pub mod ring;
pub mod stream;
pub mod tensors;
pub mod upload_buffers;
pub mod work;

use self::kernels::{Kernel, Module};
use self::memory::Memory;
use self::modules::Modules;
use self::pinned_copies::PinnedCopies;
use self::stream::Stream;
use self::upload_buffers::UploadBufferPool;
use self::work::WorkBuffers;
use crate::base::error::CudaError;
use crate::base::error::Error;
use crate::device::driver::{answer, bare, failure};
use cust::context::{Context, CurrentContext};
use cust::device::DeviceAttribute;
use cust::error::CudaError as Answer;
use cust::sys;
use pikv_core::warp::LANES;
use pikv_kernels::WARPS;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device and the driver's objects on it, dropped in the order of the fields.
pub(crate) struct Device {
    work: Mutex<WorkBuffers>,
    pub lifts: UploadBufferPool,
    pub downs: PinnedCopies,
    modules: Modules,
    pub stream: Stream,
    context: Context,
    name: String,
    ordinal: u32,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Device {
    /// Number of devices of the driver, at least 1.
    pub fn count() -> Result<u32, CudaError> {
        pikv_cuda_lazy::open().map_err(|reason| CudaError::NoLibrary {
            name: pikv_cuda_lazy::name().to_string_lossy().into_owned(),
            reason: reason.to_owned(),
        })?;
        let none = |call| {
            move |error| match error {
                Answer::NoDevice | Answer::InvalidDevice => CudaError::NoDevice,
                other => failure(call, other),
            }
        };
        cust::init(cust::CudaFlags::empty()).map_err(none("cuInit"))?;
        let devices = cust::device::Device::num_devices().map_err(none("cuDeviceGetCount"))?;
        if devices == 0 { Err(CudaError::NoDevice) } else { Ok(devices) }
    }

    /// Opens a device with a stream of its own.
    pub fn open(ordinal: u32) -> Result<Device, CudaError> {
        Device::with(ordinal, Stream::new)
    }

    /// Opens a device with the caller's stream.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, or null, and outlives the device.
    pub unsafe fn open_on(ordinal: u32, stream: *mut c_void) -> Result<Device, CudaError> {
        // SAFETY: the caller's promise.
        Device::with(ordinal, || Ok(unsafe { Stream::of(stream) }))
    }

    /// The stream of all work.
    pub fn stream(&self) -> *mut c_void {
        self.stream.handle().cast()
    }

    fn with(ordinal: u32, stream: impl FnOnce() -> Result<Stream, CudaError>) -> Result<Device, CudaError> {
        let devices = Device::count()?;
        if ordinal >= devices {
            return Err(CudaError::Ordinal { ordinal, devices });
        }
        let device = answer("cuDeviceGet", cust::device::Device::get_device(ordinal))?;
        let name = answer("cuDeviceGetName", device.name())?;
        let attribute = |which| answer("cuDeviceGetAttribute", device.get_attribute(which));
        let major = attribute(DeviceAttribute::ComputeCapabilityMajor)?;
        let minor = attribute(DeviceAttribute::ComputeCapabilityMinor)?;
        if major < 7 {
            return Err(CudaError::Capability { device: name, major, minor });
        }
        let context = answer("cuDevicePrimaryCtxRetain", Context::new(device))?;
        answer("cuCtxSetCurrent", CurrentContext::set_current(&context))?;
        let stream = stream()?;
        let modules = Modules::default();
        modules.load(Module::Full)?;
        let (work, lifts, downs) = (Mutex::default(), UploadBufferPool::new()?, PinnedCopies::default());
        Ok(Device { work, lifts, downs, modules, stream, context, name, ordinal })
    }

    /// Makes the device's context current on the calling thread.
    pub fn enter(&self) -> Result<(), CudaError> {
        answer("cuCtxSetCurrent", CurrentContext::set_current(&self.context))
    }

    /// Locks the buffers for work on the stream.
    pub fn work(&self) -> Result<MutexGuard<'_, WorkBuffers>, CudaError> {
        self.enter()?;
        // A thread that panicked leaves at most a buffer whose content nothing reads.
        Ok(self.work.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Allocates memory for pages; its content is undefined.
    pub fn allocate(self: &Arc<Self>, bytes: u64) -> Result<PageMemory, Error> {
        self.enter()?;
        Ok(PageMemory { memory: Memory::new(bytes)?, device: self.clone() })
    }

    /// Fills `words` words from `address` on.
    pub fn fill(&self, address: u64, word: u32, words: u32) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: memory that the caller holds, with its length; a fill needs nothing else.
        let code = unsafe { sys::cuMemsetD32Async(address, word, words as usize, self.stream.handle()) };
        bare("cuMemsetD32Async", code)
    }

    /// Writes words from `address` on.
    pub fn write(&self, address: u64, words: &[u32]) -> Result<(), Error> {
        self.work()?.write(&self.stream, &[(address, words)])
    }

    /// Waits for all work, and reads words from `address` on.
    pub fn read(&self, address: u64, words: u32) -> Result<Vec<u32>, Error> {
        let mut work = self.work()?;
        work.fetch(&self.stream, address, words as usize, |words| words.to_vec())
    }

    /// [`Device::read`] from several places; `f` gets their words in order. Without places it does not wait, and does not call `f`.
    pub fn read_all(&self, places: &[(u64, usize)], f: impl FnOnce(&[u32])) -> Result<(), Error> {
        if places.is_empty() {
            return Ok(());
        }
        self.work()?.fetch_all(&self.stream, places, f)
    }

    /// Loads modules of kernels that are not loaded, so that no launch has to.
    ///
    /// # Errors
    /// [`CudaError::Module`]; a lost device, unless all are loaded.
    pub fn load(&self, modules: impl IntoIterator<Item = Module>) -> Result<(), CudaError> {
        let mut missing = modules.into_iter().filter(|module| !self.modules.is_loaded(*module)).peekable();
        // Nothing is asked of a lost device here that it has: the first step of the cache returns its error.
        if missing.peek().is_some() {
            self.enter()?;
        }
        missing.try_for_each(|module| self.modules.load(module))
    }

    /// Launches a kernel over `warps` warps. Its module is loaded if it is not, which takes seconds: [`Device::load`] comes before.
    ///
    /// # Safety
    /// `arguments` point to the kernel's parameters, and the kernel's own requirements hold.
    pub unsafe fn launch(
        &self,
        kernel: Kernel,
        warps: usize,
        arguments: &[*const c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_blocks(kernel, warps.div_ceil(WARPS), WARPS, arguments) }
    }

    /// Launches a kernel over `blocks` blocks of `warps` warps.
    ///
    /// # Safety
    /// The requirements of [`Device::launch`].
    pub unsafe fn launch_blocks(
        &self,
        kernel: Kernel,
        blocks: usize,
        warps: usize,
        arguments: &[*const c_void],
    ) -> Result<(), CudaError> {
        let function = self.modules.function(kernel)?;
        // SAFETY: the caller's promise; the driver copies the parameters before it returns.
        let code = unsafe {
            sys::cuLaunchKernel(
                function.0,
                blocks as u32,
                1,
                1,
                LANES as u32 * warps as u32,
                1,
                1,
                0,
                self.stream.handle(),
                arguments.as_ptr().cast_mut().cast(),
                std::ptr::null_mut(),
            )
        };
        bare("cuLaunchKernel", code)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The fields are freed next, so no copy may still use them; a lost device has nothing to free.
        let _ = self.enter();
        let _ = self.stream.synchronize();
    }
}

/// Memory of a chunk of pages.
#[derive(Debug)]
pub(crate) struct PageMemory {
    memory: Memory,
    device: Arc<Device>,
}

impl PageMemory {
    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}

impl Drop for PageMemory {
    fn drop(&mut self) {
        // The memory is freed next, which needs the context.
        let _ = self.device.enter();
    }
}
