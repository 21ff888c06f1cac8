//! A stand-in for the CUDA driver's library: the functions that pikv's back end calls, over the interpreter of `tests/ptx`.
//!
//! Work is done when it is asked for, but what goes wrong in it shows only later, as on a device: a launch that fails returns
//! success, and every call after it the error. Copies up are done as late as may be: when something else is asked of their stream,
//! or somebody waits for it, or for an event after them; so that a kernel of another stream that does not wait finds nothing, and
//! one that waits for memory of the host that was used again finds what came later. What the interpreter finds (reads out of bounds, misaligned, of freed or unwritten
//! memory, races) is written to stderr besides.
//!
//! Two more functions are for tests: [`standin_set`] and [`standin_get`].
#![allow(non_snake_case, reason = "the driver's names")]

#[allow(dead_code, unused_imports, reason = "shared by tests that each use a part")]
#[path = "../../ptx/mod.rs"]
mod ptx;

use ptx::{Memory, Program};
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};

const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const INVALID_CONTEXT: u32 = 201;
const INVALID_PTX: u32 = 218;
const INVALID_HANDLE: u32 = 400;
const NOT_FOUND: u32 = 500;
const ILLEGAL_ADDRESS: u32 = 700;
const OUT_OF_RESOURCES: u32 = 701;
const LAUNCH_FAILED: u32 = 719;

/// [`standin_set`]: how many more allocations succeed before one fails.
pub const ALLOCATIONS: u32 = 0;
/// [`standin_set`]: how many more launches are taken before one is refused.
pub const LAUNCHES: u32 = 1;
/// [`standin_set`]: how many more launches are run before one loses the device.
pub const LOSE: u32 = 2;
/// [`standin_set`]: the compute capability, times 10.
pub const CAPABILITY: u32 = 3;
/// [`standin_set`]: brings a lost device back, and forgets what was to fail.
pub const RESET: u32 = 4;
/// [`standin_get`]: what was taken and not given back: memory, pinned memory, streams, events, modules, contexts.
pub const LIVE: u32 = 0;
/// [`standin_get`]: launches so far.
pub const LAUNCHED: u32 = 1;
/// [`standin_get`]: allocations so far, pinned ones among them.
pub const ALLOCATED: u32 = 2;
/// [`standin_get`]: instructions of warps so far.
pub const EXECUTED: u32 = 3;
/// [`standin_get`]: how often the host has waited for the stream.
pub const WAITED: u32 = 4;
/// [`standin_get`]: faults that were set and are still to come.
pub const DUE: u32 = 5;

#[derive(Default)]
struct Driver {
    memory: Memory,
    programs: HashMap<u64, Program>,
    /// Functions: their module, and the entry's name.
    functions: HashMap<u64, (u64, String)>,
    /// Streams and events.
    handles: HashSet<u64>,
    /// Copies up that were not done yet, in order.
    queue: Vec<Up>,
    /// Copies up so far.
    asked: u64,
    /// The stream of an event, and the copies that had been asked for before it.
    events: HashMap<u64, (u64, u64)>,
    pinned: HashMap<u64, Box<[u64]>>,
    contexts: u64,
    next: u64,
    launched: u64,
    allocated: u64,
    executed: u64,
    waited: u64,
    allocations_left: Option<u64>,
    launches_left: Option<u64>,
    lose_in: Option<u64>,
    capability: u64,
    /// The answer to every call, once work has failed.
    lost: Option<u32>,
}

/// A copy up.
struct Up {
    stream: u64,
    number: u64,
    to: u64,
    from: usize,
    bytes: usize,
}

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);
thread_local! {
    static CURRENT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Counts down; true once it was at 0.
fn due(left: &mut Option<u64>) -> bool {
    match left {
        Some(0) => {
            *left = None;
            true
        }
        Some(n) => {
            *n -= 1;
            false
        }
        None => false,
    }
}

fn with(f: impl FnOnce(&mut Driver) -> u32) -> u32 {
    let mut guard: MutexGuard<'_, Option<Driver>> = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    f(guard.get_or_insert_with(|| Driver { capability: 80, ..Driver::default() }))
}

/// As [`with`], for what needs a context and a device that is there.
fn alive(f: impl FnOnce(&mut Driver) -> u32) -> u32 {
    with(|driver| match driver.lost {
        Some(code) => code,
        None if !CURRENT.get() || driver.contexts == 0 => INVALID_CONTEXT,
        None => f(driver),
    })
}

impl Driver {
    fn handle(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Does the copies of `stream` up to number `last`; of all streams if there is none.
    fn catch_up(&mut self, stream: Option<u64>, last: u64) {
        let due = |up: &mut Up| stream.is_none_or(|stream| up.stream == stream) && up.number <= last;
        let due: Vec<Up> = self.queue.extract_if(.., due).collect();
        for Up { to, from, bytes, .. } in due {
            if self.lost.is_some() {
                return;
            }
            // SAFETY: the caller of the copy promised that the bytes stay until it is done.
            let from = unsafe { slice::from_raw_parts(from as *const u8, bytes) };
            if let Err(cause) = self.memory.write(to, from) {
                self.fail("copy up", &cause);
            }
        }
    }

    /// As a stream that has to do something else.
    fn catch_up_all(&mut self, stream: u64) {
        self.catch_up(Some(stream), u64::MAX);
    }

    fn fail(&mut self, what: &str, cause: &dyn std::fmt::Debug) -> u32 {
        eprintln!("stand-in: {what}: {cause:x?}");
        self.lost = Some(ILLEGAL_ADDRESS);
        ILLEGAL_ADDRESS
    }

    fn live(&self) -> u64 {
        self.memory.live() as u64
            + (self.programs.len() + self.handles.len() + self.pinned.len()) as u64
            + self.contexts
    }
}

/// Sets one of the constants; without effect for others.
#[unsafe(no_mangle)]
pub extern "C" fn standin_set(what: u32, value: u64) {
    with(|driver| {
        match what {
            ALLOCATIONS => driver.allocations_left = Some(value),
            LAUNCHES => driver.launches_left = Some(value),
            LOSE => driver.lose_in = Some(value),
            CAPABILITY => driver.capability = value,
            RESET => {
                driver.queue.clear();
                (driver.lost, driver.allocations_left, driver.launches_left, driver.lose_in) =
                    (None, None, None, None);
            }
            _ => {}
        }
        SUCCESS
    });
}

/// One of the counts.
#[unsafe(no_mangle)]
pub extern "C" fn standin_get(what: u32) -> u64 {
    let mut value = 0;
    with(|driver| {
        value = match what {
            LIVE => driver.live(),
            LAUNCHED => driver.launched,
            ALLOCATED => driver.allocated,
            EXECUTED => driver.executed + driver.programs.values().map(|p| p.executed).sum::<u64>(),
            WAITED => driver.waited,
            DUE => [driver.allocations_left, driver.launches_left, driver.lose_in]
                .iter()
                .filter(|left| left.is_some())
                .count() as u64,
            _ => 0,
        };
        SUCCESS
    });
    value
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> u32 {
    SUCCESS
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { *version = 12_000 };
    SUCCESS
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { *text = c"an error of the stand-in".as_ptr() };
    SUCCESS
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { *count = 1 };
    SUCCESS
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { *device = ordinal };
    if ordinal == 0 { SUCCESS } else { 101 }
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> u32 {
    let text = c"PTX interpreter".to_bytes_with_nul();
    if text.len() > len as usize {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise; the text fits.
    unsafe { name.cast::<u8>().copy_from(text.as_ptr(), text.len()) };
    SUCCESS
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: u32, _device: c_int) -> u32 {
    with(|driver| {
        let found = match attribute {
            75 => driver.capability / 10,
            76 => driver.capability % 10,
            _ => return INVALID_VALUE,
        };
        // SAFETY: the caller's promise.
        unsafe { *value = found as c_int };
        SUCCESS
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { *bytes = 1 << 30 };
    SUCCESS
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, _device: c_int) -> u32 {
    with(|driver| {
        driver.contexts += 1;
        // SAFETY: the caller's promise.
        unsafe { *context = 1 };
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> u32 {
    with(|driver| {
        driver.contexts -= 1;
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: u64) -> u32 {
    with(|driver| {
        CURRENT.set(context == 1);
        driver.lost.unwrap_or(SUCCESS)
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut u64,
    image: *const c_char,
    _count: c_uint,
    _options: *mut c_void,
    _values: *mut c_void,
) -> u32 {
    alive(|driver| {
        // SAFETY: the caller's promise: the image is text that ends in a 0.
        let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
        let target: u64 = text
            .split_once(".target sm_")
            .and_then(|(_, rest)| rest.get(..2)?.parse().ok())
            .unwrap_or(u64::MAX);
        if target > driver.capability {
            return 209;
        }
        match Program::load(&text, &mut driver.memory) {
            Ok(program) => {
                let handle = driver.handle();
                driver.programs.insert(handle, program);
                // SAFETY: the caller's promise.
                unsafe { *module = handle };
                SUCCESS
            }
            Err(error) => {
                eprintln!("stand-in: {error}");
                INVALID_PTX
            }
        }
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: u64) -> u32 {
    with(|driver| match driver.programs.remove(&module) {
        Some(program) => {
            driver.executed += program.executed;
            program.unload(&mut driver.memory);
            driver.functions.retain(|_, (of, _)| *of != module);
            driver.lost.unwrap_or(SUCCESS)
        }
        None => INVALID_HANDLE,
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) -> u32 {
    alive(|driver| {
        // SAFETY: the caller's promise.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let Some(program) = driver.programs.get(&module) else { return INVALID_HANDLE };
        if program.parameters(&name).is_none() {
            return NOT_FOUND;
        }
        let handle = driver.handle();
        driver.functions.insert(handle, (module, name));
        // SAFETY: the caller's promise.
        unsafe { *function = handle };
        SUCCESS
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    grid: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: u64,
    arguments: *const *const u8,
    _extra: *mut c_void,
) -> u32 {
    alive(|driver| {
        let Some((module, name)) = driver.functions.get(&function) else { return INVALID_HANDLE };
        if !driver.handles.contains(&stream) {
            return INVALID_HANDLE;
        }
        if (grid_y, grid_z, block_y, block_z, shared) != (1, 1, 1, 1, 0) || grid == 0 || block > 1024 {
            return INVALID_VALUE;
        }
        let (module, name) = (*module, name.clone());
        if due(&mut driver.launches_left) {
            return OUT_OF_RESOURCES;
        }
        driver.catch_up_all(stream);
        driver.launched += 1;
        if due(&mut driver.lose_in) {
            driver.lost = Some(LAUNCH_FAILED);
            return SUCCESS;
        }
        let Some(program) = driver.programs.get_mut(&module) else { return INVALID_HANDLE };
        let sizes = program.parameters(&name).unwrap_or_default();
        // SAFETY: the caller's promise: a pointer for each parameter, to as many bytes as it has.
        let arguments: Vec<&[u8]> = unsafe {
            let pointers = slice::from_raw_parts(arguments, sizes.len());
            pointers.iter().zip(&sizes).map(|(at, size)| slice::from_raw_parts(*at, *size)).collect()
        };
        if let Err(fault) = program.launch(&mut driver.memory, &name, grid, block, &arguments) {
            driver.fail(&name, &fault);
        }
        SUCCESS
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32 {
    alive(|driver| {
        driver.allocated += 1;
        if due(&mut driver.allocations_left) {
            return OUT_OF_MEMORY;
        }
        // SAFETY: the caller's promise.
        unsafe { *address = driver.memory.allocate(bytes) };
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    with(|driver| {
        driver.catch_up(None, u64::MAX);
        match (CURRENT.get(), driver.memory.free(address)) {
            (false, _) => INVALID_CONTEXT,
            (true, Ok(())) => driver.lost.unwrap_or(SUCCESS),
            (true, Err(cause)) => driver.fail("free", &cause),
        }
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(address: *mut u64, bytes: usize) -> u32 {
    alive(|driver| {
        driver.allocated += 1;
        if due(&mut driver.allocations_left) {
            return OUT_OF_MEMORY;
        }
        let mut memory = vec![0xa5a5_a5a5_a5a5_a5a5u64; bytes.div_ceil(8)].into_boxed_slice();
        let at = memory.as_mut_ptr() as u64;
        driver.pinned.insert(at, memory);
        // SAFETY: the caller's promise.
        unsafe { *address = at };
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: u64) -> u32 {
    with(|driver| {
        driver.catch_up(None, u64::MAX);
        match driver.pinned.remove(&address) {
            Some(_) => driver.lost.unwrap_or(SUCCESS),
            None => INVALID_VALUE,
        }
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, stream: u64) -> u32 {
    alive(|driver| {
        if !driver.handles.contains(&stream) {
            return INVALID_HANDLE;
        }
        driver.asked += 1;
        driver.queue.push(Up { stream, number: driver.asked, to, from: from as usize, bytes });
        SUCCESS
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, stream: u64) -> u32 {
    alive(|driver| {
        driver.catch_up_all(stream);
        match driver.memory.read::<u8>(from, bytes) {
            Ok(found) => {
                // SAFETY: the caller's promise.
                unsafe { to.copy_from(found.as_ptr(), bytes) };
                SUCCESS
            }
            Err(cause) => driver.fail("copy down", &cause),
        }
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) -> u32 {
    alive(|driver| {
        driver.catch_up(None, u64::MAX);
        // SAFETY: the caller's promise.
        let from = unsafe { slice::from_raw_parts(from, bytes) };
        match driver.memory.write(to, from) {
            Ok(()) => SUCCESS,
            Err(cause) => driver.fail("copy up", &cause),
        }
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) -> u32 {
    with(|driver| {
        driver.catch_up(None, u64::MAX);
        SUCCESS
    });
    // SAFETY: the caller's promise.
    unsafe { cuMemcpyDtoHAsync_v2(to, from, bytes, 0) }
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: u64) -> u32 {
    alive(|driver| {
        driver.catch_up_all(stream);
        match driver.memory.write(to, &vec![value; count]) {
            Ok(()) => SUCCESS,
            Err(cause) => driver.fail("fill", &cause),
        }
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut u64,
    _flags: c_uint,
    _priority: c_int,
) -> u32 {
    alive(|driver| {
        let handle = driver.handle();
        driver.handles.insert(handle);
        // SAFETY: the caller's promise.
        unsafe { *stream = handle };
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: u64) -> u32 {
    with(|driver| match driver.handles.remove(&stream) {
        true => {
            driver.catch_up_all(stream);
            driver.events.remove(&stream);
            driver.lost.unwrap_or(SUCCESS)
        }
        false => INVALID_HANDLE,
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: u64) -> u32 {
    alive(|driver| {
        driver.waited += 1;
        driver.catch_up_all(stream);
        if driver.handles.contains(&stream) { SUCCESS } else { INVALID_HANDLE }
    })
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut u64, _flags: c_uint) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { cuStreamCreateWithPriority(event, 0, 0) }
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: u64) -> u32 {
    cuStreamDestroy_v2(event)
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: u64, stream: u64) -> u32 {
    alive(|driver| match driver.handles.contains(&event) && driver.handles.contains(&stream) {
        true => {
            driver.events.insert(event, (stream, driver.asked));
            SUCCESS
        }
        false => INVALID_HANDLE,
    })
}

/// The driver's function. The stream waits here and now: what is asked of it later cannot be before.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> u32 {
    alive(|driver| match driver.handles.contains(&stream) {
        true => reached(driver, event),
        false => INVALID_HANDLE,
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: u64) -> u32 {
    alive(|driver| reached(driver, event))
}

/// Does what was asked for before an event.
fn reached(driver: &mut Driver, event: u64) -> u32 {
    if let Some((stream, last)) = driver.events.get(&event).copied() {
        driver.catch_up(Some(stream), last);
    }
    if driver.handles.contains(&event) { SUCCESS } else { INVALID_HANDLE }
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(_milliseconds: *mut f32, _from: u64, _to: u64) -> u32 {
    // Time of an interpreter is nobody's time.
    801
}
