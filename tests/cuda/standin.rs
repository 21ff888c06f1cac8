//! Finds the driver's stand-in beside the test binary, and opens it in place of the driver.

use libloading::Library;
use pikv::Backend;
use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

/// Settings; the stand-in uses the same numbers.
#[derive(Clone, Copy)]
pub enum Set {
    Allocations = 0,
    Launches = 1,
    Lose = 2,
    Capability = 3,
    Reset = 4,
    Devices = 5,
    Slow = 6,
    Late = 7,
    Count = 8,
    Modules = 9,
}

/// Counters.
#[derive(Clone, Copy)]
pub enum Get {
    Live = 0,
    Launched = 1,
    Allocated = 2,
    Executed = 3,
    Waited = 4,
    Due = 5,
    Bytes = 6,
    Uploaded = 7,
    Compiled = 8,
}

/// One world of the stand-in's devices, for one test at a time.
pub struct Standin {
    pub library: &'static Library,
    world: u32,
}

/// The worlds in use, a bit each.
static TAKEN: Mutex<u8> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

impl Drop for Standin {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) &= !(1 << self.world);
        FREED.notify_one();
    }
}

/// The stand-in, or the library that `PIKV_TEST_DRIVER` names in its place (the witness: see `.ci/witness`).
fn path() -> PathBuf {
    if let Some(other) = std::env::var_os("PIKV_TEST_DRIVER") {
        return other.into();
    }
    let test = std::env::current_exe().expect("a test has a path");
    let file = format!("{}pikv_standin{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    test.with_file_name(file)
}

/// The stand-in's library.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = path();
        // SAFETY: this runs once, and every test of this binary passes here before anything reads the environment.
        unsafe { std::env::set_var("PIKV_LIBCUDA", &path) };
        // SAFETY: its initialisers do nothing.
        unsafe { Library::new(&path) }.unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    })
}

impl Standin {
    /// Waits for a world, and puts the calling thread in it. There is one device.
    pub fn new() -> Standin {
        let library = library();
        let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken =
            FREED.wait_while(taken, |taken| *taken == u8::MAX).unwrap_or_else(PoisonError::into_inner);
        let world = taken.trailing_ones();
        *taken |= 1 << world;
        drop(taken);
        let standin = Standin { library, world };
        // Removes the previous test's device with all that was left on it.
        standin.set(Set::Devices, 0);
        standin.set(Set::Devices, 1);
        standin
    }

    /// [`Standin::new`] with several devices.
    pub fn with_devices(n: u32) -> Standin {
        let standin = Standin::new();
        standin.set(Set::Devices, u64::from(n));
        standin
    }

    /// Puts the calling thread in this world, where all its devices are.
    fn enter(&self) {
        // SAFETY: the function's signature.
        let enter = unsafe { self.library.get::<extern "C" fn(u32)>(b"standin_enter\0") };
        enter.expect("the stand-in has it")(self.world);
    }

    /// Faults are those of the first device.
    pub fn set(&self, what: Set, value: u64) {
        self.enter();
        // SAFETY: the function's signature.
        let set = unsafe { self.library.get::<extern "C" fn(u32, u64)>(b"standin_set\0") };
        set.expect("the stand-in has it")(what as u32, value);
    }

    pub fn set_on(&self, device: u32, what: Set, value: u64) {
        self.enter();
        // SAFETY: the function's signature.
        let set = unsafe { self.library.get::<extern "C" fn(i32, u32, u64)>(b"standin_set_on\0") };
        set.expect("the stand-in has it")(device as i32, what as u32, value);
    }

    /// Over all devices.
    pub fn get(&self, what: Get) -> u64 {
        self.enter();
        // SAFETY: the function's signature.
        let get = unsafe { self.library.get::<extern "C" fn(u32) -> u64>(b"standin_get\0") };
        get.expect("the stand-in has it")(what as u32)
    }

    pub fn get_on(&self, device: u32, what: Get) -> u64 {
        self.enter();
        // SAFETY: the function's signature.
        let get = unsafe { self.library.get::<extern "C" fn(i32, u32) -> u64>(b"standin_get_on\0") };
        get.expect("the stand-in has it")(device as i32, what as u32)
    }

    /// Loaded modules with this kernel, over all devices.
    pub fn having(&self, kernel: &CStr) -> u64 {
        self.enter();
        // SAFETY: the function's signature, and a name that ends in a 0.
        unsafe {
            let having = self.library.get::<unsafe extern "C" fn(*const c_char) -> u64>(b"standin_having\0");
            having.expect("the stand-in has it")(kernel.as_ptr())
        }
    }

    /// The first device.
    pub fn backend(&self) -> Backend {
        self.enter();
        Backend::cuda().unwrap_or_else(|e| panic!("{e}"))
    }

    /// All devices.
    pub fn backends(&self) -> Vec<Backend> {
        self.enter();
        let devices = Backend::cuda_devices().unwrap_or_else(|e| panic!("{e}"));
        (0..devices).map(|i| Backend::cuda_device(i).unwrap_or_else(|e| panic!("{e}"))).collect()
    }
}
