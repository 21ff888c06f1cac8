//! An engine with its tensors in device memory: it allocates and copies through the driver's own functions, here the stand-in's.

use crate::standin::library;
use half::{bf16, f16};
use pikv::cuda::DeviceSlice;
use pikv::{Backend, Dtype};
use std::ffi::c_void;

/// A value rounded to a dtype.
pub fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

fn bytes(x: f32, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

fn size(dtype: Dtype) -> usize {
    bytes(0.0, dtype).len()
}

/// Memory on a back end's device, and copies on its stream.
pub struct Engine {
    context: Context,
    stream: *mut c_void,
    memory: Vec<u64>,
    /// Sources of copies to the device, until the host waits.
    kept: Vec<Vec<u8>>,
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
    pub fn new(ordinal: i32) -> Context {
        let (mut device, mut handle) = (0, 0);
        // SAFETY: the driver's signature.
        let of = unsafe { library().get::<extern "C" fn(*mut i32, i32) -> u32>(b"cuDeviceGet\0") };
        done("device", of.expect("there")(&mut device, ordinal));
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

    /// Uninitialised memory for f32.
    pub fn room(&mut self, len: usize) -> DeviceSlice {
        self.room_of(len, Dtype::F32)
    }

    /// The same of any dtype. Elements of 16 bits begin at even and at odd ones in turns.
    pub fn room_of(&mut self, len: usize, dtype: Dtype) -> DeviceSlice {
        let mut address = 0;
        let before = if size(dtype) == 2 { self.memory.len() % 2 * 2 } else { 0 };
        done("enter", self.context.enter());
        // SAFETY: the driver's signature.
        let allocate = unsafe { library().get::<extern "C" fn(*mut u64, usize) -> u32>(b"cuMemAlloc_v2\0") };
        done("allocate", allocate.expect("there")(&mut address, before + size(dtype) * len));
        self.memory.push(address);
        // SAFETY: the allocation has that many elements, and is freed when the engine is dropped, which waits for the stream first.
        unsafe { DeviceSlice::new(address + before as u64, len, dtype) }
    }

    /// Copies values to a tensor, as work of the stream.
    pub fn write(&mut self, to: DeviceSlice, values: Vec<f32>) {
        assert_eq!(to.len(), values.len());
        let values: Vec<u8> = values.into_iter().flat_map(|x| bytes(x, to.dtype())).collect();
        done("enter", self.context.enter());
        // SAFETY: the driver's signature; the values are kept until the stream is waited for.
        unsafe {
            let copy = library()
                .get::<extern "C" fn(u64, *const u8, usize, *mut c_void) -> u32>(b"cuMemcpyHtoDAsync_v2\0");
            done("up", copy.expect("there")(to.address(), values.as_ptr(), values.len(), self.stream));
        }
        self.kept.push(values);
    }

    /// A tensor of these values.
    pub fn put(&mut self, values: Vec<f32>) -> DeviceSlice {
        self.put_of(values, Dtype::F32)
    }

    /// A tensor of these values, rounded to a dtype.
    pub fn put_of(&mut self, values: Vec<f32>, dtype: Dtype) -> DeviceSlice {
        let to = self.room_of(values.len(), dtype);
        self.write(to, values);
        to
    }

    /// The values of a tensor as f32, after waiting for the stream.
    pub fn read(&mut self, from: DeviceSlice) -> Vec<f32> {
        let mut values = vec![0u8; from.len() * size(from.dtype())];
        done("enter", self.context.enter());
        // SAFETY: the driver's signature; the stream is waited for before the values are read.
        unsafe {
            let copy = library()
                .get::<extern "C" fn(*mut u8, u64, usize, *mut c_void) -> u32>(b"cuMemcpyDtoHAsync_v2\0");
            let (to, bytes) = (values.as_mut_ptr(), values.len());
            done("down", copy.expect("there")(to, from.address(), bytes, self.stream));
        }
        done("wait", self.wait());
        let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        let value = |bytes: &[u8]| match from.dtype() {
            Dtype::F16 => f16::from_bits(half(bytes)).to_f32(),
            Dtype::Bf16 => bf16::from_bits(half(bytes)).to_f32(),
            _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        };
        values.chunks_exact(size(from.dtype())).map(value).collect()
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
        // A lost device has no work in progress.
        self.wait();
        // SAFETY: the driver's signature.
        let free = unsafe { library().get::<extern "C" fn(u64) -> u32>(b"cuMemFree_v2\0") };
        let free = free.expect("there");
        for address in self.memory.drain(..) {
            free(address);
        }
    }
}
