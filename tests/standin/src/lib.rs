//! A stand-in for the CUDA driver's library: the functions that pikv's back end calls, over the interpreter.
//!
//! The environment variable `PIKV_STANDIN_DEVICES`, read at the first call, or [`DEVICES`] sets the number of devices; one by default.
//! Each has its own memory, streams and faults: handles and addresses of one are invalid on another.
//!
//! There are [`WORLDS`] such sets of devices, so that as many tests can run in parallel. A thread counts and opens the devices of the
//! world that it entered by [`standin_enter`], by default the first. A device's handle and its context name the world too, so other
//! threads reach it by them.
//!
//! Work is done when it is requested, but its errors show only later, as on a device: a launch that fails returns success, and every
//! later call returns the error. Copies to the device are done as late as possible: when something else is requested of their stream, or
//! the host waits for the stream or for an event after them. So a kernel on another stream that does not wait does not find the data, and
//! one that waits for host memory that was reused finds the newer data. Copies to the host take the data when they are requested, but
//! deliver it when the host waits, so a host that does not wait finds the old data. Waiting for an event that was never recorded is an
//! error here, though not in a driver.
//!
//! With [`LATE`] all work is late: it is done when the host waits for it, or for something that waits for it. Copies to the device in
//! other streams then come before it, as early as the events allow that they wait for. So memory that another stream overwrites before a
//! launch has read it shows. The environment variable `PIKV_STANDIN_LATE=1` sets it for all devices.
//!
//! With [`COUNT`] calls are counted, and no work is done.
//!
//! Faults found by the interpreter (reads out of bounds, misaligned, of freed or unwritten memory, races) are also written to stderr.
//!
//! A few more functions serve tests: [`standin_set`] and [`standin_get`], those of one device, and [`standin_having`].
#![allow(non_snake_case, reason = "the driver's names")]

mod queue;

use pikv_interpreter::{Memory, Program};
use queue::{Down, Queues, Work};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::{ptr, slice};

/// Sets of devices that know nothing of each other.
pub const WORLDS: usize = 8;
/// Devices of a world, at most.
const MOST: usize = 8;

const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const INVALID_DEVICE: u32 = 101;
const INVALID_CONTEXT: u32 = 201;
const INVALID_PTX: u32 = 218;
const INVALID_HANDLE: u32 = 400;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;
const ILLEGAL_ADDRESS: u32 = 700;
const OUT_OF_RESOURCES: u32 = 701;
const LAUNCH_FAILED: u32 = 719;

/// Options of a module: the address of the log for errors, and its bytes.
const ERROR_LOG: c_uint = 5;
const ERROR_LOG_BYTES: c_uint = 6;

/// [`standin_set`]: how many more allocations succeed before one fails.
pub const ALLOCATIONS: u32 = 0;
/// [`standin_set`]: how many more launches are taken before one is refused.
pub const LAUNCHES: u32 = 1;
/// [`standin_set`]: how many more launches are run before one loses the device.
pub const LOSE: u32 = 2;
/// [`standin_set`]: the compute capability, times 10.
pub const CAPABILITY: u32 = 3;
/// [`standin_set`]: restores lost devices, and removes faults that are still due.
pub const RESET: u32 = 4;
/// [`standin_set`]: number of devices. Removed devices must not be in use.
pub const DEVICES: u32 = 5;
/// [`standin_set`]: whether an event counts as passed only after the host waited for it, or for a later one.
pub const SLOW: u32 = 6;
/// [`standin_set`]: whether all work is late, and copies of other streams come before it.
pub const LATE: u32 = 7;
/// [`standin_set`]: whether calls are counted and no work is done. Memory allocated since then has no bytes.
pub const COUNT: u32 = 8;
/// [`standin_set`]: how many more modules load before the compiler refuses one, and says so in the log.
pub const MODULES: u32 = 9;
/// [`standin_get`]: objects created and not freed: memory, pinned memory, streams, events, modules, contexts.
pub const LIVE: u32 = 0;
/// [`standin_get`]: launches so far.
pub const LAUNCHED: u32 = 1;
/// [`standin_get`]: allocations so far, pinned ones among them.
pub const ALLOCATED: u32 = 2;
/// [`standin_get`]: instructions of warps so far.
pub const EXECUTED: u32 = 3;
/// [`standin_get`]: how often the host has waited: for a stream, or for an event that had not passed.
pub const WAITED: u32 = 4;
/// [`standin_get`]: faults that are still due.
pub const DUE: u32 = 5;
/// [`standin_get`]: bytes of memory that are not freed.
pub const BYTES: u32 = 6;
/// [`standin_get`]: bytes that were copied up so far.
pub const UPLOADED: u32 = 7;
/// [`standin_get`]: texts of modules that were given to the compiler so far.
pub const COMPILED: u32 = 8;

/// The devices of a world; none before it is first used.
type World = Option<Vec<Mutex<Device>>>;

#[derive(Default)]
struct Device {
    memory: Memory,
    programs: HashMap<u64, Program>,
    /// Functions: their module, and the entry's name.
    functions: HashMap<u64, (u64, String)>,
    /// Streams and events.
    handles: HashSet<u64>,
    /// Work that was not done yet.
    queues: Queues,
    /// Copies to the host that are not delivered yet.
    landing: Vec<Down>,
    /// Number of operations requested of streams.
    asked: u64,
    /// The stream of an event, and the number of operations requested before it.
    events: HashMap<u64, (u64, u64)>,
    /// For each stream, the number up to which the host waited.
    passed: HashMap<u64, u64>,
    slow: bool,
    late: bool,
    counts: bool,
    pinned: HashMap<u64, Box<[u64]>>,
    contexts: u64,
    launched: u64,
    allocated: u64,
    executed: u64,
    waited: u64,
    uploaded: u64,
    compiled: u64,
    allocations_left: Option<u64>,
    launches_left: Option<u64>,
    lose_in: Option<u64>,
    modules_left: Option<u64>,
    capability: u64,
    /// The answer to every call, once work has failed.
    lost: Option<u32>,
}

static ALL: [RwLock<World>; WORLDS] = [const { RwLock::new(None) }; WORLDS];
/// The last handle that was given. Handles differ over all devices.
static LAST: AtomicU64 = AtomicU64::new(0);
thread_local! {
    /// The world of the thread.
    static WORLD: Cell<usize> = const { Cell::new(0) };
    /// The context of the thread: 1 + its device's handle, 0 for none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
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

/// Devices `from..to` of a world.
fn devices(world: usize, from: usize, to: usize) -> impl Iterator<Item = Mutex<Device>> {
    let memory = move |i| Memory::of((world * MOST + i) as u32);
    let late = std::env::var_os("PIKV_STANDIN_LATE").is_some_and(|value| value == "1");
    (from..to.min(MOST))
        .map(move |i| Mutex::new(Device { memory: memory(i), capability: 80, late, ..Device::default() }))
}

/// The devices of a world, which is made if it is used for the first time.
fn world(world: usize) -> RwLockReadGuard<'static, World> {
    let read = || ALL[world].read().unwrap_or_else(PoisonError::into_inner);
    if read().is_none() {
        let named = std::env::var("PIKV_STANDIN_DEVICES").ok().and_then(|n| n.parse().ok());
        let mut of = ALL[world].write().unwrap_or_else(PoisonError::into_inner);
        of.get_or_insert_with(|| devices(world, 0, named.unwrap_or(1)).collect());
    }
    read()
}

/// The device of that handle, if there is one.
fn on(handle: c_int, f: impl FnOnce(&mut Device) -> u32) -> u32 {
    let at = handle as usize;
    if at >= WORLDS * MOST {
        return INVALID_DEVICE;
    }
    match world(at / MOST).as_ref().and_then(|devices| devices.get(at % MOST)) {
        Some(device) => f(&mut device.lock().unwrap_or_else(PoisonError::into_inner)),
        None => INVALID_DEVICE,
    }
}

/// The handle of a device of the thread's world; of no device if the number is too large.
fn handle(ordinal: c_int) -> c_int {
    match (ordinal as usize) < MOST {
        true => (WORLD.get() * MOST) as c_int + ordinal,
        false => c_int::MAX,
    }
}

/// Every device of the thread's world.
fn each(mut f: impl FnMut(&mut Device)) {
    for device in world(WORLD.get()).iter().flatten() {
        f(&mut device.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The device of the thread's context, lost or not, and the next handle.
fn current(f: impl FnOnce(&mut Device, u64) -> u32) -> u32 {
    let Some(device) = CURRENT.get().checked_sub(1) else { return INVALID_CONTEXT };
    let mut answer = INVALID_CONTEXT;
    on(device as c_int, |device| {
        if device.contexts > 0 {
            answer = f(device, 1 + LAST.fetch_add(1, Ordering::Relaxed));
        }
        answer
    });
    answer
}

/// [`current`], with an error if the device is lost.
fn alive_with(f: impl FnOnce(&mut Device, u64) -> u32) -> u32 {
    current(|device, handle| match device.lost {
        Some(code) => code,
        None => f(device, handle),
    })
}

/// [`alive_with`], without a handle.
fn alive(f: impl FnOnce(&mut Device) -> u32) -> u32 {
    alive_with(|device, _| f(device))
}

impl Device {
    /// Copies down, at once.
    ///
    /// # Safety
    /// `to` is that long.
    unsafe fn down(&mut self, to: *mut u8, from: u64, bytes: usize) -> u32 {
        match self.memory.read::<u8>(from, bytes) {
            Ok(found) => {
                // SAFETY: the caller promises arguments that are valid for the driver's function.
                unsafe { to.copy_from(found.as_ptr(), bytes) };
                SUCCESS
            }
            Err(cause) => self.fail(&format!("copy down: {cause:x?}")),
        }
    }

    /// Whether the stream exists; the default one always does.
    fn streams(&self, stream: u64) -> bool {
        stream == 0 || self.handles.contains(&stream)
    }

    fn live(&self) -> u64 {
        self.memory.live() as u64
            + (self.programs.len() + self.handles.len() + self.pinned.len()) as u64
            + self.contexts
    }
}

impl Device {
    fn set(&mut self, what: u32, value: u64) {
        match what {
            ALLOCATIONS => self.allocations_left = Some(value),
            LAUNCHES => self.launches_left = Some(value),
            LOSE => self.lose_in = Some(value),
            MODULES => self.modules_left = Some(value),
            CAPABILITY => self.capability = value,
            SLOW => self.slow = value != 0,
            LATE => self.late = value != 0,
            COUNT => self.counts = value != 0,
            RESET => {
                if self.lost.is_some() {
                    self.queues.clear();
                    self.landing.clear();
                }
                self.slow = false;
                (self.lost, self.allocations_left, self.launches_left, self.lose_in) =
                    (None, None, None, None);
                self.modules_left = None;
            }
            _ => {}
        }
    }

    fn get(&self, what: u32) -> u64 {
        match what {
            LIVE => self.live(),
            LAUNCHED => self.launched,
            ALLOCATED => self.allocated,
            EXECUTED => self.executed + self.programs.values().map(|p| p.executed).sum::<u64>(),
            WAITED => self.waited,
            UPLOADED => self.uploaded,
            COMPILED => self.compiled,
            DUE => {
                let due = [self.allocations_left, self.launches_left, self.lose_in, self.modules_left];
                due.iter().filter(|left| left.is_some()).count() as u64
            }
            BYTES => self.memory.bytes() as u64,
            _ => 0,
        }
    }
}

/// Puts the calling thread in a world.
#[unsafe(no_mangle)]
pub extern "C" fn standin_enter(world: u32) {
    WORLD.set(world as usize % WORLDS);
}

/// Sets one of the constants in the thread's world: faults of its first device, all else of all. Without effect for others.
#[unsafe(no_mangle)]
pub extern "C" fn standin_set(what: u32, value: u64) {
    match what {
        DEVICES => {
            let at = WORLD.get();
            drop(world(at));
            let mut of = ALL[at].write().unwrap_or_else(PoisonError::into_inner);
            let of = of.get_or_insert_default();
            of.truncate(value as usize);
            of.extend(devices(at, of.len(), value as usize));
        }
        ALLOCATIONS | LAUNCHES | LOSE | MODULES => standin_set_on(0, what, value),
        _ => each(|device| device.set(what, value)),
    }
}

/// [`standin_set`] for one device.
#[unsafe(no_mangle)]
pub extern "C" fn standin_set_on(ordinal: c_int, what: u32, value: u64) {
    on(handle(ordinal), |device| {
        device.set(what, value);
        SUCCESS
    });
}

/// One of the counts, over all devices of the thread's world.
#[unsafe(no_mangle)]
pub extern "C" fn standin_get(what: u32) -> u64 {
    let mut value = 0;
    each(|device| value += device.get(what));
    value
}

/// [`standin_get`] for one device.
#[unsafe(no_mangle)]
pub extern "C" fn standin_get_on(ordinal: c_int, what: u32) -> u64 {
    let mut value = 0;
    on(handle(ordinal), |device| {
        value = device.get(what);
        SUCCESS
    });
    value
}

/// Modules with an entry of this name that are loaded on the devices of the thread's world.
///
/// # Safety
/// The name is text that ends in a 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_having(entry: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let entry = unsafe { CStr::from_ptr(entry) }.to_string_lossy();
    let mut modules = 0;
    each(|device| {
        modules +=
            device.programs.values().filter(|program| program.parameters(&entry).is_some()).count() as u64;
    });
    modules
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> u32 {
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { *version = 12_000 };
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { *text = c"an error of the stand-in".as_ptr() };
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    let devices = world(WORLD.get()).as_ref().map_or(0, Vec::len);
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { *count = devices as c_int };
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    let found = handle(ordinal);
    on(found, |_| {
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        unsafe { *device = found };
        SUCCESS
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> u32 {
    let text = c"PTX interpreter".to_bytes_with_nul();
    if text.len() > len as usize {
        return INVALID_VALUE;
    }
    // SAFETY: the caller promises arguments that are valid for the driver's function; the text fits.
    unsafe { name.cast::<u8>().copy_from(text.as_ptr(), text.len()) };
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: u32, device: c_int) -> u32 {
    on(device, |of| {
        let found = match attribute {
            75 => of.capability / 10,
            76 => of.capability % 10,
            _ => return INVALID_VALUE,
        };
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        unsafe { *value = found as c_int };
        SUCCESS
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { *bytes = 1 << 30 };
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> u32 {
    on(device, |of| {
        of.contexts += 1;
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        unsafe { *context = 1 + device as u64 };
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> u32 {
    on(device, |device| {
        device.contexts -= 1;
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: u64) -> u32 {
    CURRENT.set(context);
    match context {
        0 => SUCCESS,
        _ => current(|device, _| device.lost.unwrap_or(SUCCESS)),
    }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut u64,
    image: *const c_char,
    count: c_uint,
    options: *const c_uint,
    values: *const *mut c_void,
) -> u32 {
    alive_with(|device, handle| {
        // SAFETY: the caller promises arguments that are valid for the driver's function: the image is text that ends in a 0, and there are
        // as many options and values as it says.
        let (text, log) =
            unsafe { (CStr::from_ptr(image).to_string_lossy(), error_log(count, options, values)) };
        device.compiled += 1;
        if due(&mut device.modules_left) {
            // SAFETY: the caller's log has room for what it says.
            unsafe { log_to(log, "stand-in: told to refuse this module") };
            return INVALID_PTX;
        }
        let target: u64 = text
            .split_once(".target sm_")
            .and_then(|(_, rest)| rest.get(..2)?.parse().ok())
            .unwrap_or(u64::MAX);
        if target > device.capability {
            return 209;
        }
        match Program::load(&text, &mut device.memory) {
            Ok(program) => {
                device.programs.insert(handle, program);
                // SAFETY: the caller promises arguments that are valid for the driver's function.
                unsafe { *module = handle };
                SUCCESS
            }
            Err(error) => {
                eprintln!("stand-in: {error}");
                // SAFETY: the caller's log has room for what it says.
                unsafe { log_to(log, &format!("stand-in: {error}")) };
                INVALID_PTX
            }
        }
    })
}

/// The log for errors that options of a module name, and its bytes; of none without one.
///
/// # Safety
/// There are `count` options, and as many values, of the kinds that the driver takes.
unsafe fn error_log(count: c_uint, options: *const c_uint, values: *const *mut c_void) -> (*mut u8, usize) {
    let (mut to, mut bytes) = (ptr::null_mut(), 0);
    for i in 0..count as usize {
        // SAFETY: the caller's promise.
        let (option, value) = unsafe { (options.add(i).read(), values.add(i).read()) };
        match option {
            ERROR_LOG => to = value.cast(),
            ERROR_LOG_BYTES => bytes = value.addr(),
            _ => {}
        }
    }
    (to, if to.is_null() { 0 } else { bytes })
}

/// Writes a text to a log, as much as it has room for, and a 0.
///
/// # Safety
/// The log is memory of so many bytes.
unsafe fn log_to((to, bytes): (*mut u8, usize), text: &str) {
    let Some(room) = bytes.checked_sub(1) else { return };
    let len = text.len().min(room);
    // SAFETY: the caller's promise; the text and the 0 fit.
    unsafe {
        to.copy_from(text.as_ptr(), len);
        to.add(len).write(0);
    }
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: u64) -> u32 {
    current(|device, _| {
        device.finish_all();
        let Some(program) = device.programs.remove(&module) else { return INVALID_HANDLE };
        device.executed += program.executed;
        program.unload(&mut device.memory);
        device.functions.retain(|_, (of, _)| *of != module);
        device.lost.unwrap_or(SUCCESS)
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) -> u32 {
    alive_with(|device, handle| {
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let Some(program) = device.programs.get(&module) else { return INVALID_HANDLE };
        if program.parameters(&name).is_none() {
            return NOT_FOUND;
        }
        device.functions.insert(handle, (module, name));
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        unsafe { *function = handle };
        SUCCESS
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
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
    alive(|device| {
        let Some((module, entry)) = device.functions.get(&function) else { return INVALID_HANDLE };
        if !device.streams(stream) {
            return INVALID_HANDLE;
        }
        if (grid_y, grid_z, block_y, block_z, shared) != (1, 1, 1, 1, 0) || grid == 0 || block > 1024 {
            return INVALID_VALUE;
        }
        let (module, entry) = (*module, entry.clone());
        if due(&mut device.launches_left) {
            return OUT_OF_RESOURCES;
        }
        device.launched += 1;
        if due(&mut device.lose_in) {
            device.lost = Some(LAUNCH_FAILED);
            return SUCCESS;
        }
        let Some(program) = device.programs.get(&module) else { return INVALID_HANDLE };
        let sizes = program.parameters(&entry).unwrap_or_default();
        // SAFETY: the caller promises arguments that are valid for the driver's function: a pointer for each parameter, to as many bytes
        // as it has.
        let arguments = unsafe {
            let pointers = slice::from_raw_parts(arguments, sizes.len()).iter().zip(&sizes);
            pointers.map(|(at, size)| slice::from_raw_parts(*at, *size).to_vec()).collect()
        };
        device.request(stream, Work::Launch { module, entry, grid, block, arguments });
        SUCCESS
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32 {
    alive(|device| {
        device.allocated += 1;
        if due(&mut device.allocations_left) {
            return OUT_OF_MEMORY;
        }
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        unsafe { *address = device.memory.allocate(if device.counts { 0 } else { bytes }) };
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    current(|device, _| {
        device.finish_all();
        device.land(None, u64::MAX);
        match device.memory.free(address) {
            Ok(()) => device.lost.unwrap_or(SUCCESS),
            Err(cause) => device.fail(&format!("free: {cause:x?}")),
        }
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(address: *mut u64, bytes: usize) -> u32 {
    alive(|device| {
        device.allocated += 1;
        if due(&mut device.allocations_left) {
            return OUT_OF_MEMORY;
        }
        let mut memory = vec![0xa5a5_a5a5_a5a5_a5a5u64; bytes.div_ceil(8)].into_boxed_slice();
        let at = memory.as_mut_ptr() as u64;
        device.pinned.insert(at, memory);
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        unsafe { *address = at };
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: u64) -> u32 {
    current(|device, _| {
        device.finish_all();
        device.land(None, u64::MAX);
        match device.pinned.remove(&address) {
            Some(_) => device.lost.unwrap_or(SUCCESS),
            None => INVALID_VALUE,
        }
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, stream: u64) -> u32 {
    alive(|device| {
        if !device.streams(stream) {
            return INVALID_HANDLE;
        }
        device.uploaded += bytes as u64;
        device.request(stream, Work::Up { to, from: from as usize, bytes });
        SUCCESS
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, stream: u64) -> u32 {
    alive(|device| {
        if !device.streams(stream) {
            return INVALID_HANDLE;
        }
        device.request(stream, Work::Down { to: to as usize, from, bytes });
        device.lost.unwrap_or(SUCCESS)
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) -> u32 {
    alive(|device| {
        device.finish_all();
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        let from = unsafe { slice::from_raw_parts(from, bytes) };
        match device.memory.write(to, from) {
            Ok(()) => SUCCESS,
            Err(cause) => device.fail(&format!("copy up: {cause:x?}")),
        }
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) -> u32 {
    alive(|device| {
        device.finish_all();
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        unsafe { device.down(to, from, bytes) }
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16Async(to: u64, value: u16, count: usize, stream: u64) -> u32 {
    fill(to, &vec![value; count], stream)
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: u64) -> u32 {
    fill(to, &vec![value; count], stream)
}

fn fill<T: bytemuck::Pod>(to: u64, values: &[T], stream: u64) -> u32 {
    alive(|device| {
        if !device.streams(stream) {
            return INVALID_HANDLE;
        }
        device.request(stream, Work::Fill { to, bytes: bytemuck::cast_slice(values).to_vec() });
        device.lost.unwrap_or(SUCCESS)
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut u64,
    _flags: c_uint,
    _priority: c_int,
) -> u32 {
    alive_with(|device, handle| {
        device.handles.insert(handle);
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        unsafe { *stream = handle };
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: u64) -> u32 {
    current(|device, _| match device.handles.remove(&stream) {
        true => {
            device.finish(stream, u64::MAX);
            device.land(Some(stream), u64::MAX);
            device.events.remove(&stream);
            device.passed.remove(&stream);
            device.lost.unwrap_or(SUCCESS)
        }
        false => INVALID_HANDLE,
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: u64) -> u32 {
    alive(|device| {
        device.waited += 1;
        device.finish(stream, u64::MAX);
        device.land(Some(stream), u64::MAX);
        if device.streams(stream) { SUCCESS } else { INVALID_HANDLE }
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut u64, _flags: c_uint) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
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
    alive(|device| match device.handles.contains(&event) && device.streams(stream) {
        true => {
            device.events.insert(event, (stream, device.asked));
            SUCCESS
        }
        false => INVALID_HANDLE,
    })
}

/// The driver's function. The stream waits at once, unless work is late, so its later work follows the event.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> u32 {
    alive(|device| {
        if !device.streams(stream) || !device.handles.contains(&event) {
            return INVALID_HANDLE;
        }
        let Some((of, last)) = device.events.get(&event).copied() else {
            eprintln!("stand-in: a stream waits for an event that was never recorded");
            return INVALID_VALUE;
        };
        match device.late {
            true => device.request(stream, Work::Wait { stream: of, last }),
            false => device.finish(of, last),
        }
        SUCCESS
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: u64) -> u32 {
    alive(|device| match device.handles.contains(&event) {
        true if device.under_way(event) => NOT_READY,
        true => SUCCESS,
        false => INVALID_HANDLE,
    })
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: u64) -> u32 {
    alive(|device| {
        device.waited += u64::from(device.under_way(event));
        if let Some((stream, last)) = device.events.get(&event).copied() {
            device.finish(stream, last);
            device.land(Some(stream), last);
        }
        if device.handles.contains(&event) { SUCCESS } else { INVALID_HANDLE }
    })
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(value: *mut u32, attribute: u32, address: u64) -> u32 {
    let bytes = |device: &Device| usize::from(!device.counts);
    let holds = |at: &usize| {
        on(*at as c_int, |device| u32::from(!device.memory.holds(address, bytes(device)))) == SUCCESS
    };
    match (attribute, (0..WORLDS * MOST).find(holds)) {
        (9, Some(at)) => {
            // SAFETY: the caller promises arguments that are valid for the driver's function.
            unsafe { *value = (at % MOST) as u32 };
            SUCCESS
        }
        _ => INVALID_VALUE,
    }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(_milliseconds: *mut f32, _from: u64, _to: u64) -> u32 {
    // An interpreter has no meaningful times.
    801
}
