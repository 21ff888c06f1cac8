//! The kernels on a CUDA device, timed by events.

use bytemuck::{NoUninit, cast_slice};
use cust::context::{Context, CurrentContext};
use cust::device::Device;
use cust::event::{Event, EventFlags};
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use pikv_kernels::ptx;
use std::ffi::c_void;
use std::time::Duration;

/// Threads of a block of a launch.
pub const THREADS: u32 = 128;

/// A device with the kernels. Fields are given back in their order.
pub struct Gpu {
    pub name: String,
    /// Whether it measures time.
    pub clock: bool,
    from: Event,
    to: Event,
    stream: Stream,
    module: Module,
    _context: Context,
}

/// Device memory, as words.
pub type Memory = DeviceBuffer<u32>;

impl Gpu {
    /// The first device, or why there is none.
    pub fn open() -> Result<Gpu, String> {
        pikv_cuda_lazy::open()?;
        let text = |e: cust::error::CudaError| format!("{e:?}");
        cust::init(cust::CudaFlags::empty()).map_err(text)?;
        let device = Device::get_device(0).map_err(text)?;
        let context = Context::new(device).map_err(text)?;
        CurrentContext::set_current(&context).map_err(text)?;
        let module = Module::from_ptx(ptx::TEXT, &[]).map_err(text)?;
        let event = || Event::new(EventFlags::DEFAULT).map_err(text);
        let mut gpu = Gpu {
            name: device.name().map_err(text)?,
            clock: false,
            from: event()?,
            to: event()?,
            stream: Stream::new(StreamFlags::NON_BLOCKING, None).map_err(text)?,
            module,
            _context: context,
        };
        // SAFETY: no launch, so no promise.
        gpu.clock = unsafe { gpu.time("append", 0, &[], 0) }.is_some();
        Ok(gpu)
    }

    /// Memory that holds `data`.
    pub fn put<T: NoUninit>(&self, data: &[T]) -> Memory {
        Memory::from_slice(cast_slice(data)).expect("the device has memory")
    }

    /// The first `n` f32.
    pub fn floats(&self, memory: &Memory, n: usize) -> Vec<f32> {
        let mut words = vec![0u32; n];
        memory.index(..n).copy_to(&mut words).expect("the device answers");
        words.into_iter().map(f32::from_bits).collect()
    }

    /// Launches a kernel over `warps` warps, and waits for it.
    ///
    /// # Safety
    /// `arguments` point to the kernel's parameters, and what it is promised holds.
    pub unsafe fn run(&self, kernel: &str, warps: usize, arguments: &[*const c_void]) {
        // SAFETY: the caller's own promise.
        unsafe { self.launch(kernel, warps, arguments, 1) };
        self.stream.synchronize().expect("the launch succeeds");
    }

    /// How long `times` launches take, as the device counts; `None` if it does not.
    ///
    /// # Safety
    /// As for [`Gpu::run`].
    pub unsafe fn time(
        &self,
        kernel: &str,
        warps: usize,
        arguments: &[*const c_void],
        times: u64,
    ) -> Option<Duration> {
        self.from.record(&self.stream).expect("the stream takes events");
        // SAFETY: the caller's own promise.
        unsafe { self.launch(kernel, warps, arguments, times) };
        self.to.record(&self.stream).expect("the stream takes events");
        self.to.synchronize().expect("the launches succeed");
        self.to.elapsed(&self.from).ok()
    }

    unsafe fn launch(&self, kernel: &str, warps: usize, arguments: &[*const c_void], times: u64) {
        let function = self.module.get_function(kernel).expect("the module has it");
        let pointers: Vec<*mut c_void> = arguments.iter().map(|at| at.cast_mut()).collect();
        let grid = (warps as u32 * 32).div_ceil(THREADS);
        for _ in 0..times {
            // SAFETY: the caller's own promise.
            let launched = unsafe { self.stream.launch(&function, grid, THREADS, 0, &pointers) };
            launched.expect("the device takes launches");
        }
    }
}

/// Pointers to a kernel's parameters.
macro_rules! arguments {
    ($($x:expr),* $(,)?) => { &[$(std::ptr::from_ref(&$x).cast::<std::ffi::c_void>()),*] };
}
pub(crate) use arguments;
