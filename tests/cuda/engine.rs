//! An engine whose tensors lie on the device: memory and copies of the driver's own, asked of the stand-in's library.

use crate::standin::library;
use pikv::{Backend, DeviceSlice};
use std::ffi::c_void;

/// Memory on the device of a back end, and what is copied there on its stream.
pub struct Engine {
    context: Context,
    stream: *mut c_void,
    memory: Vec<u64>,
    /// What copies up read, until somebody waits.
    kept: Vec<Vec<f32>>,
}

fn done(call: &str, code: u32) {
    assert_eq!(code, 0, "{call}");
}

/// A device's primary context, held.
pub struct Context {
    device: i32,
    handle: u64,
}

impl Context {
    pub fn new(device: i32) -> Context {
        let mut handle = 0;
        // SAFETY: the driver's signature.
        let retain =
            unsafe { library().get::<extern "C" fn(*mut u64, i32) -> u32>(b"cuDevicePrimaryCtxRetain\0") };
        done("retain", retain.expect("there")(&mut handle, device));
        Context { device, handle }
    }

    /// Makes it the thread's. A device that is lost says so.
    fn enter(&self) -> u32 {
        // SAFETY: the driver's signature.
        let enter = unsafe { library().get::<extern "C" fn(u64) -> u32>(b"cuCtxSetCurrent\0") };
        enter.expect("there")(self.handle)
    }

    pub fn stream(&self) -> *mut c_void {
        let mut stream = std::ptr::null_mut();
        done("enter", self.enter());
        // SAFETY: the driver's signature.
        let create = unsafe {
            library().get::<extern "C" fn(*mut *mut c_void, u32, i32) -> u32>(b"cuStreamCreateWithPriority\0")
        };
        done("stream", create.expect("there")(&mut stream, 1, 0));
        stream
    }

    pub fn destroy(&self, stream: *mut c_void) {
        done("enter", self.enter());
        // SAFETY: the driver's signature.
        let destroy = unsafe { library().get::<extern "C" fn(*mut c_void) -> u32>(b"cuStreamDestroy_v2\0") };
        done("destroy", destroy.expect("there")(stream));
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the driver's signature.
        let release =
            unsafe { library().get::<extern "C" fn(i32) -> u32>(b"cuDevicePrimaryCtxRelease_v2\0") };
        release.expect("there")(self.device);
    }
}

impl Engine {
    /// On the stream of a back end that is the first device.
    pub fn new(backend: &Backend) -> Engine {
        Engine::on(0, backend)
    }

    /// The same of any device.
    pub fn on(device: i32, backend: &Backend) -> Engine {
        let stream = backend.stream().expect("a device");
        Engine { context: Context::new(device), stream, memory: Vec::new(), kept: Vec::new() }
    }

    /// Memory that nobody wrote.
    pub fn room(&mut self, len: usize) -> DeviceSlice {
        let mut address = 0;
        done("enter", self.context.enter());
        // SAFETY: the driver's signature.
        let allocate = unsafe { library().get::<extern "C" fn(*mut u64, usize) -> u32>(b"cuMemAlloc_v2\0") };
        done("allocate", allocate.expect("there")(&mut address, 4 * len));
        self.memory.push(address);
        // SAFETY: that many f32, given back when the engine goes, which waits for the stream first.
        unsafe { DeviceSlice::new(address, len) }
    }

    /// Copies values to a tensor, as work of the stream.
    pub fn write(&mut self, to: DeviceSlice, values: Vec<f32>) {
        assert_eq!(to.len(), values.len());
        done("enter", self.context.enter());
        // SAFETY: the driver's signature; the values are kept until the stream is waited for.
        unsafe {
            let copy = library()
                .get::<extern "C" fn(u64, *const f32, usize, *mut c_void) -> u32>(b"cuMemcpyHtoDAsync_v2\0");
            done("up", copy.expect("there")(to.address(), values.as_ptr(), 4 * values.len(), self.stream));
        }
        self.kept.push(values);
    }

    /// A tensor of these values.
    pub fn put(&mut self, values: Vec<f32>) -> DeviceSlice {
        let to = self.room(values.len());
        self.write(to, values);
        to
    }

    /// What lies in a tensor once the stream has passed.
    pub fn read(&mut self, from: DeviceSlice) -> Vec<f32> {
        let mut values = vec![f32::NAN; from.len()];
        done("enter", self.context.enter());
        // SAFETY: the driver's signature; the stream is waited for before the values are read.
        unsafe {
            let copy = library()
                .get::<extern "C" fn(*mut f32, u64, usize, *mut c_void) -> u32>(b"cuMemcpyDtoHAsync_v2\0");
            let (to, bytes) = (values.as_mut_ptr(), 4 * values.len());
            done("down", copy.expect("there")(to, from.address(), bytes, self.stream));
        }
        done("wait", self.wait());
        values
    }

    fn wait(&mut self) -> u32 {
        self.context.enter();
        // SAFETY: the driver's signature.
        let wait = unsafe { library().get::<extern "C" fn(*mut c_void) -> u32>(b"cuStreamSynchronize\0") };
        let code = wait.expect("there")(self.stream);
        self.kept.clear();
        code
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A device that is lost has nothing under way.
        self.wait();
        // SAFETY: the driver's signature.
        let free = unsafe { library().get::<extern "C" fn(u64) -> u32>(b"cuMemFree_v2\0") };
        let free = free.expect("there");
        for address in self.memory.drain(..) {
            free(address);
        }
    }
}
