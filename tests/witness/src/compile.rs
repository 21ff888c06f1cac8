//! Compiles a kernel that was written as C, and opens it.

use libloading::Library;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, process};

/// Where compiled kernels are kept, by the hash of what they were compiled from.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/witness");
/// Products and sums are not contracted, and overflow wraps. More optimisation would take longer than it saves.
const OPTIONS: [&str; 10] = [
    "-std=gnu11",
    "-O1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-math-errno",
    "-w",
    "-fPIC",
    "-shared",
    "-xc",
];
/// The three lowest bits of a kernel's result; the line is above them.
const FAULTS: [&str; 8] = [
    "",
    "",
    "a trap",
    "a misaligned access",
    "a division by zero",
    "too many jumps back",
    "lanes that never meet",
    "a shuffle that reads a lane outside its mask",
];

type Launch = unsafe extern "C" fn(*const *const u8, u32, u32, u32, *mut [u32; 2]) -> u32;

/// A compiled kernel.
pub struct Kernel {
    launch: Launch,
    /// Holds the function.
    _library: Library,
}

/// Compiles a program, unless that was done before.
///
/// # Errors
/// What the compiler says, or the system of its files.
pub fn kernel(program: &str) -> Result<Kernel, String> {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut options = OPTIONS.to_vec();
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("fma") {
        options.insert(0, "-mfma");
    }
    let mut hasher = DefaultHasher::new();
    (program, &compiler, &options).hash(&mut hasher);
    let folder = Path::new(FOLDER);
    let library = folder.join(format!("{:016x}.so", hasher.finish()));
    if !library.exists() {
        static COMPILED: AtomicUsize = AtomicUsize::new(0);
        let number = COMPILED.fetch_add(1, Ordering::Relaxed);
        fs::create_dir_all(folder).map_err(|e| e.to_string())?;
        let own = |kind: &str| library.with_extension(format!("{}.{number}.{kind}", process::id()));
        let (source, built) = (own("c"), own("so"));
        fs::write(&source, program).map_err(|e| e.to_string())?;
        let run =
            Command::new(&compiler).args(&options).arg(&source).arg("-o").arg(&built).arg("-lm").output();
        let run = run.map_err(|e| format!("{compiler}: {e}"))?;
        if !run.status.success() {
            return Err(String::from_utf8_lossy(&run.stderr).into_owned());
        }
        fs::rename(&built, &library).map_err(|e| e.to_string())?;
        fs::remove_file(&source).map_err(|e| e.to_string())?;
    }
    // SAFETY: the library has no initialisers.
    let library = unsafe { Library::new(&library) }.map_err(|e| e.to_string())?;
    // SAFETY: the function's signature.
    let launch = *unsafe { library.get::<Launch>(b"launch\0") }.map_err(|e| e.to_string())?;
    Ok(Kernel { launch, _library: library })
}

impl Kernel {
    /// Runs the kernel; `highest` lanes first, or the lowest.
    ///
    /// # Errors
    /// What the kernel did wrong, where.
    ///
    /// # Safety
    /// See [`Program::launch`](crate::Program::launch); there must be as many arguments as the kernel has parameters.
    pub unsafe fn launch(
        &self,
        (grid, block): (u32, u32),
        arguments: &[*const u8],
        highest: bool,
    ) -> Result<(), String> {
        let mut place = [0; 2];
        // SAFETY: the caller's own promise.
        let code = unsafe { (self.launch)(arguments.as_ptr(), grid, block, highest.into(), &raw mut place) };
        match code {
            0 => Ok(()),
            code => {
                let (what, line, [warp, lane]) = (FAULTS[code as usize & 7], code >> 3, place);
                Err(format!("line {line}, warp {warp}, lane {lane}: {what}"))
            }
        }
    }
}
