//! The stand-in for the driver, found beside the test and opened in its place.

use libloading::Library;
use pikv::Backend;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What can be set; the stand-in has the same numbers.
#[derive(Clone, Copy)]
pub enum Set {
    Allocations = 0,
    Launches = 1,
    Lose = 2,
    Capability = 3,
    Reset = 4,
    Devices = 5,
    Slow = 6,
}

/// What can be asked.
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
}

/// The stand-in, for one test at a time.
pub struct Standin {
    pub library: &'static Library,
    _turn: MutexGuard<'static, ()>,
}

fn path() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let file = format!("{}pikv_standin{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    test.with_file_name(file)
}

/// The stand-in's library.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = path();
        // SAFETY: once, and every test of this binary comes here before anything else reads the environment.
        unsafe { std::env::set_var("PIKV_LIBCUDA", &path) };
        // SAFETY: its initialisers do nothing.
        unsafe { Library::new(&path) }.unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    })
}

impl Standin {
    /// Waits for the test's turn. There is one device.
    pub fn new() -> Standin {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let standin = Standin { library: library(), _turn: turn };
        standin.set(Set::Devices, 1);
        standin.set(Set::Reset, 0);
        standin.set(Set::Capability, 80);
        standin
    }

    /// As [`Standin::new`], with several devices.
    pub fn with_devices(n: u32) -> Standin {
        let standin = Standin::new();
        standin.set(Set::Devices, u64::from(n));
        standin
    }

    /// Faults are those of the first device.
    pub fn set(&self, what: Set, value: u64) {
        // SAFETY: the function's signature.
        let set = unsafe { self.library.get::<extern "C" fn(u32, u64)>(b"standin_set\0") };
        set.expect("the stand-in has it")(what as u32, value);
    }

    pub fn set_on(&self, device: u32, what: Set, value: u64) {
        // SAFETY: the function's signature.
        let set = unsafe { self.library.get::<extern "C" fn(i32, u32, u64)>(b"standin_set_on\0") };
        set.expect("the stand-in has it")(device as i32, what as u32, value);
    }

    /// Over all devices.
    pub fn get(&self, what: Get) -> u64 {
        // SAFETY: the function's signature.
        let get = unsafe { self.library.get::<extern "C" fn(u32) -> u64>(b"standin_get\0") };
        get.expect("the stand-in has it")(what as u32)
    }

    pub fn get_on(&self, device: u32, what: Get) -> u64 {
        // SAFETY: the function's signature.
        let get = unsafe { self.library.get::<extern "C" fn(i32, u32) -> u64>(b"standin_get_on\0") };
        get.expect("the stand-in has it")(device as i32, what as u32)
    }

    /// The first device.
    pub fn backend(&self) -> Backend {
        Backend::cuda().unwrap_or_else(|e| panic!("{e}"))
    }

    /// All devices.
    pub fn backends(&self) -> Vec<Backend> {
        let devices = Backend::cuda_devices().unwrap_or_else(|e| panic!("{e}"));
        (0..devices).map(|i| Backend::cuda_device(i).unwrap_or_else(|e| panic!("{e}"))).collect()
    }
}
