//! Defines the symbols of the CUDA driver that `cust` links, and forwards each to the driver's own library, which is opened at the first
//! call. So one binary runs with and without a driver; without one every call returns `CUDA_ERROR_NO_DEVICE`.
//!
//! The library is `libcuda.so.1` (`nvcuda.dll` on Windows), or the one that the environment variable `PIKV_LIBCUDA` names at the first
//! call: a driver in another folder, or a stand-in.
#![allow(non_snake_case, reason = "the driver's names")]

use std::env;
use std::ffi::{OsString, c_char, c_void};
use std::hint::black_box;
use std::sync::OnceLock;

use libloading::Library;

/// The environment variable with the name of another library.
pub const VARIABLE: &str = "PIKV_LIBCUDA";

const NO_DEVICE: u32 = 100;
const NOT_FOUND: u32 = 500;
const UNKNOWN: u32 = 999;

static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();

/// File name of the library.
pub fn name() -> OsString {
    let usual = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    env::var_os(VARIABLE).unwrap_or_else(|| usual.into())
}

fn library() -> Result<&'static Library, &'static str> {
    // SAFETY: this runs the initialisers of the driver's library, as every program that links it does.
    let open = || unsafe { Library::new(name()) }.map_err(|e| e.to_string());
    LIBRARY.get_or_init(open).as_ref().map_err(String::as_str)
}

/// Opens the library, unless it was opened before.
///
/// # Errors
/// The system's message for a library that cannot be opened.
pub fn open() -> Result<(), &'static str> {
    // Keeps all symbols in the binary, in any link order.
    black_box(&SYMBOLS);
    library().map(|_| ())
}

/// `code` if it is a value of the enumeration that cust was built with, else `CUDA_ERROR_UNKNOWN`: cust converts codes without a check,
/// and newer drivers have more.
fn known(code: u32) -> u32 {
    match code {
        0..=8 | 34 | 100..=102 | 200..=202 | 205..=224 | 300..=304 | 400 | 401 | 500 | 600 => code,
        700..=705 | 708..=720 | 800..=809 | 900..=911 => code,
        _ => UNKNOWN,
    }
}

macro_rules! forward {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        $(
            /// # Safety
            /// The caller keeps the promises of the driver's function of this name.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
                type Function = unsafe extern "C" fn($($kind),*) -> u32;
                static FOUND: OnceLock<Result<Function, u32>> = OnceLock::new();
                let found = FOUND.get_or_init(|| {
                    let library = library().map_err(|_| NO_DEVICE)?;
                    // SAFETY: the signature is that of the driver's function of this name.
                    let symbol = unsafe { library.get::<Function>(concat!(stringify!($name), "\0").as_bytes()) };
                    symbol.map(|symbol| *symbol).map_err(|_| NOT_FOUND)
                });
                match found {
                    // SAFETY: the caller promises what the driver's function asks for.
                    Ok(function) => known(unsafe { function($($argument),*) }),
                    Err(code) => *code,
                }
            }
        )*

        // For the program or library that contains pikv alone: it does not offer them to other libraries of the process, which must reach
        // the driver's own.
        #[cfg(all(unix, not(target_vendor = "apple"), any(target_arch = "x86_64", target_arch = "aarch64")))]
        core::arch::global_asm!($(concat!(".hidden ", stringify!($name))),*);

        struct Symbol(#[allow(dead_code, reason = "keeps the symbol")] *const c_void);
        // SAFETY: the address of a function, which is never read through.
        unsafe impl Sync for Symbol {}
        static SYMBOLS: &[Symbol] = &[$(Symbol($name as *const c_void)),*];
    };
}

type P = *mut c_void;

forward! {
    cuInit(flags: u32);
    cuDriverGetVersion(version: P);
    cuGetErrorString(code: u32, text: *mut *const c_char);
    cuDeviceGet(device: P, ordinal: i32);
    cuDeviceGetCount(count: P);
    cuDeviceGetName(name: *mut c_char, len: i32, device: i32);
    cuDeviceGetAttribute(value: P, attribute: u32, device: i32);
    cuDeviceTotalMem_v2(bytes: P, device: i32);
    cuDevicePrimaryCtxRetain(context: P, device: i32);
    cuDevicePrimaryCtxRelease_v2(device: i32);
    cuCtxSetCurrent(context: P);
    cuModuleLoadDataEx(module: P, image: P, count: u32, options: P, values: P);
    cuModuleUnload(module: P);
    cuModuleGetFunction(function: P, module: P, name: *const c_char);
    cuLaunchKernel(function: P, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: P, arguments: P, extra: P);
    cuMemAlloc_v2(address: P, bytes: usize);
    cuMemFree_v2(address: u64);
    cuMemAllocHost_v2(address: P, bytes: usize);
    cuMemFreeHost(address: P);
    cuMemcpyHtoD_v2(to: u64, from: P, bytes: usize);
    cuMemcpyDtoH_v2(to: P, from: u64, bytes: usize);
    cuMemcpyHtoDAsync_v2(to: u64, from: P, bytes: usize, stream: P);
    cuMemcpyDtoHAsync_v2(to: P, from: u64, bytes: usize, stream: P);
    cuPointerGetAttribute(data: P, attribute: u32, address: u64);
    cuMemsetD16Async(to: u64, value: u16, count: usize, stream: P);
    cuMemsetD32Async(to: u64, value: u32, count: usize, stream: P);
    cuStreamCreateWithPriority(stream: P, flags: u32, priority: i32);
    cuStreamDestroy_v2(stream: P);
    cuStreamSynchronize(stream: P);
    cuStreamWaitEvent(stream: P, event: P, flags: u32);
    cuEventCreate(event: P, flags: u32);
    cuEventDestroy_v2(event: P);
    cuEventRecord(event: P, stream: P);
    cuEventSynchronize(event: P);
    cuEventQuery(event: P);
    cuEventElapsedTime(milliseconds: P, from: P, to: P);
}
