//! The functions of the CUDA driver that pikv calls, over memory of this process: all work is done when it is requested.
//!
//! `PIKV_WITNESS_ORDER=highest` runs the highest lanes first. `PIKV_WITNESS_SEEN` names a file to which the name of each kernel is added
//! when a process first launches it. A launch that fails ends the process: no test expects one here.
//!
//! For the tests that set and read the stand-in's numbers there are [`standin_enter`] and its siblings, with those numbers that need no
//! faults: the count of devices is set, the counts of launches are read, and all other counts are 0.
#![allow(non_snake_case, reason = "the driver's names")]

use crate::{Order, Program};
use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, ptr, slice};

/// Sets of devices, one for each test that runs at the time, and devices of each, at most.
const WORLDS: usize = 8;
const MOST: usize = 8;
/// Alignment of memory.
const ALIGN: usize = 256;
/// Numbers of the stand-in: [`standin_set`] the devices, [`standin_get`] the launches.
const DEVICES: u32 = 5;
const LAUNCHED: u32 = 1;

const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const INVALID_DEVICE: u32 = 101;
const INVALID_CONTEXT: u32 = 201;
const INVALID_PTX: u32 = 218;
const NOT_FOUND: u32 = 500;

/// Devices of each world; 0 for those that are named by the environment.
static COUNTS: [AtomicU64; WORLDS] = [const { AtomicU64::new(u64::MAX) }; WORLDS];
static LAUNCHES: [AtomicU64; WORLDS * MOST] = [const { AtomicU64::new(0) }; WORLDS * MOST];
static HANDLES: AtomicU64 = AtomicU64::new(1);
/// Modules by their text: tests load the same one for each device.
static MODULES: Mutex<Vec<(String, &'static Program)>> = Mutex::new(Vec::new());
/// Memory: its bytes, and the device.
static MEMORY: Mutex<BTreeMap<u64, (usize, usize)>> = Mutex::new(BTreeMap::new());
static SEEN: Mutex<Option<HashSet<String>>> = Mutex::new(None);

thread_local! {
    static WORLD: Cell<usize> = const { Cell::new(0) };
    /// 1 + the device of the context, 0 for none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// A kernel of a module.
struct Function {
    program: &'static Program,
    name: String,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Devices of a world.
fn devices(world: usize) -> usize {
    match COUNTS[world].load(Ordering::Relaxed) {
        u64::MAX => env::var("PIKV_STANDIN_DEVICES").ok().and_then(|n| n.parse().ok()).unwrap_or(1).min(MOST),
        count => (count as usize).min(MOST),
    }
}

/// The device of the thread's context.
fn current() -> Option<usize> {
    CURRENT.get().checked_sub(1)
}

/// A handle that no other object has.
fn handle() -> u64 {
    HANDLES.fetch_add(1, Ordering::Relaxed)
}

/// Puts a value where the caller of a driver's function wants it.
///
/// # Safety
/// The address must be valid for writes.
unsafe fn give<T>(to: *mut T, value: T) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    SUCCESS
}

/// Puts the calling thread in a world.
#[unsafe(no_mangle)]
pub extern "C" fn standin_enter(world: u32) {
    WORLD.set(world as usize % WORLDS);
}

/// Sets the number of devices of the thread's world. Other settings have no effect.
#[unsafe(no_mangle)]
pub extern "C" fn standin_set(what: u32, value: u64) {
    if what == DEVICES {
        COUNTS[WORLD.get()].store(value, Ordering::Relaxed);
    }
}

/// Without effect.
#[unsafe(no_mangle)]
pub extern "C" fn standin_set_on(_ordinal: c_int, _what: u32, _value: u64) {}

/// Launches on all devices of the thread's world; 0 for other counts.
#[unsafe(no_mangle)]
pub extern "C" fn standin_get(what: u32) -> u64 {
    (0..MOST as c_int).map(|ordinal| standin_get_on(ordinal, what)).sum()
}

/// [`standin_get`] for one device.
#[unsafe(no_mangle)]
pub extern "C" fn standin_get_on(ordinal: c_int, what: u32) -> u64 {
    match what {
        LAUNCHED => LAUNCHES[WORLD.get() * MOST + ordinal as usize % MOST].load(Ordering::Relaxed),
        _ => 0,
    }
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
    unsafe { give(version, 12_000) }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(text, c"an error of the witness".as_ptr()) }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(count, devices(WORLD.get()) as c_int) }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    let world = WORLD.get();
    match (ordinal as usize) < devices(world) {
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        true => unsafe { give(device, (world * MOST) as c_int + ordinal) },
        false => INVALID_DEVICE,
    }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> u32 {
    let text = c"PTX as C".to_bytes_with_nul();
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
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: u32, _device: c_int) -> u32 {
    match attribute {
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        75 => unsafe { give(value, 8) },
        // SAFETY: as above.
        76 => unsafe { give(value, 0) },
        _ => INVALID_VALUE,
    }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(bytes, 1 << 30) }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(context, 1 + device as u64) }
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> u32 {
    SUCCESS
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: u64) -> u32 {
    CURRENT.set(context as usize);
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut *const Program,
    image: *const c_char,
    _count: c_uint,
    _options: *mut c_void,
    _values: *mut c_void,
) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function: the image is text that ends in a 0.
    let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
    let mut modules = lock(&MODULES);
    let known = modules.iter().find(|(known, _)| *known == text).map(|(_, program)| *program);
    let program = match known.map_or_else(|| Program::new(&text).map(|of| &*Box::leak(Box::new(of))), Ok) {
        Ok(program) => program,
        Err(error) => {
            eprintln!("witness: {error}");
            return INVALID_PTX;
        }
    };
    if known.is_none() {
        modules.push((text.into_owned(), program));
    }
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(module, program) }
}

/// The driver's function. The module stays for the next that loads it.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(_module: u64) -> u32 {
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *const c_void,
    module: *const Program,
    name: *const c_char,
) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function; modules are never freed.
    let (program, name) = unsafe { (&*module, CStr::from_ptr(name)) };
    let name = name.to_string_lossy().into_owned();
    if program.parameters(&name).is_none() {
        return NOT_FOUND;
    }
    let found: &Function = Box::leak(Box::new(Function { program, name }));
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(function, ptr::from_ref(found).cast()) }
}

/// Adds the name of a kernel to the file that `PIKV_WITNESS_SEEN` names, once a process.
fn note(name: &str) {
    let mut seen = lock(&SEEN);
    let seen = seen.get_or_insert_default();
    if !seen.contains(name)
        && let Some(file) = env::var_os("PIKV_WITNESS_SEEN")
    {
        let file = OpenOptions::new().create(true).append(true).open(file);
        file.and_then(|mut file| writeln!(file, "{name}")).expect("the file of launched kernels");
        seen.insert(name.to_owned());
    }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's")]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *const c_void,
    grid: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    _stream: u64,
    arguments: *const *const u8,
    _extra: *mut c_void,
) -> u32 {
    let Some(device) = current() else { return INVALID_CONTEXT };
    if (grid_y, grid_z, block_y, block_z, shared) != (1, 1, 1, 1, 0) || grid == 0 || block > 1024 {
        return INVALID_VALUE;
    }
    // SAFETY: a function was found by `cuModuleGetFunction`, and is never freed.
    let Function { program, name } = unsafe { &*function.cast::<Function>() };
    LAUNCHES[device].fetch_add(1, Ordering::Relaxed);
    note(name);
    let order = match env::var("PIKV_WITNESS_ORDER").as_deref() {
        Ok("highest") => Order::HighestFirst,
        _ => Order::LowestFirst,
    };
    // SAFETY: the caller promises a pointer for each parameter, to as many bytes as it has, and addresses of memory of this process.
    let ran = unsafe {
        let arguments = slice::from_raw_parts(arguments, program.parameters(name).unwrap_or_default());
        program.launch(name, (grid, block), arguments, order)
    };
    if let Err(fault) = ran {
        eprintln!("witness: {fault}");
        std::process::abort();
    }
    SUCCESS
}

/// Allocates memory of junk.
fn allocate(bytes: usize, device: usize) -> Option<u64> {
    let layout = Layout::from_size_align(bytes.max(1), ALIGN).ok()?;
    // SAFETY: the size is not 0.
    let at = unsafe { alloc(layout) };
    if at.is_null() {
        return None;
    }
    // SAFETY: it was just allocated with this size.
    unsafe { at.write_bytes(0xa5, layout.size()) };
    lock(&MEMORY).insert(at as u64, (layout.size(), device));
    Some(at as u64)
}

/// Frees what [`allocate`] returned.
fn free(address: u64) -> u32 {
    let Some((bytes, _)) = lock(&MEMORY).remove(&address) else { return INVALID_VALUE };
    let layout = Layout::from_size_align(bytes, ALIGN).expect("as it was allocated");
    // SAFETY: it was allocated with this layout, and is freed once.
    unsafe { dealloc(address as *mut u8, layout) };
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32 {
    let Some(device) = current() else { return INVALID_CONTEXT };
    match allocate(bytes, device) {
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        Some(at) => unsafe { give(address, at) },
        None => OUT_OF_MEMORY,
    }
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    free(address)
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(address: *mut u64, bytes: usize) -> u32 {
    match allocate(bytes, usize::MAX) {
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        Some(at) => unsafe { give(address, at) },
        None => OUT_OF_MEMORY,
    }
}

/// The driver's function.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: u64) -> u32 {
    free(address)
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { (to as *mut u8).copy_from(from, bytes) };
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { to.copy_from(from as *const u8, bytes) };
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, _stream: u64) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { cuMemcpyHtoD_v2(to, from, bytes) }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, _stream: u64) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { cuMemcpyDtoH_v2(to, from, bytes) }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD16Async(to: *mut u16, value: u16, count: usize, _stream: u64) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { slice::from_raw_parts_mut(to, count) }.fill(value);
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD32Async(to: *mut u32, value: c_uint, count: usize, _stream: u64) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { slice::from_raw_parts_mut(to, count) }.fill(value);
    SUCCESS
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(value: *mut u32, attribute: u32, address: u64) -> u32 {
    let memory = lock(&MEMORY);
    let below = memory.range(..=address).next_back();
    match below.filter(|(at, (bytes, _))| address - **at < *bytes as u64) {
        // SAFETY: the caller promises arguments that are valid for the driver's function.
        Some((_, (_, device))) if attribute == 9 => unsafe { give(value, (device % MOST) as u32) },
        _ => INVALID_VALUE,
    }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut u64,
    _flags: c_uint,
    _priority: c_int,
) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(stream, handle()) }
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut u64, _flags: c_uint) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(event, handle()) }
}

/// Functions of the driver that have nothing to do: all work is done.
macro_rules! done {
    ($($name:ident($($kind:ty),*);)*) => {$(
        /// The driver's function.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($(_: $kind),*) -> u32 {
            SUCCESS
        }
    )*};
}

done! {
    cuStreamDestroy_v2(u64);
    cuStreamSynchronize(u64);
    cuStreamWaitEvent(u64, u64, c_uint);
    cuEventDestroy_v2(u64);
    cuEventRecord(u64, u64);
    cuEventQuery(u64);
    cuEventSynchronize(u64);
}

/// # Safety
/// The arguments must be valid for the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, _from: u64, _to: u64) -> u32 {
    // SAFETY: the caller promises arguments that are valid for the driver's function.
    unsafe { give(milliseconds, 0.0) }
}
