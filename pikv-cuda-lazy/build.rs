//! `cust` links `-lcuda`. This crate defines the symbols that it needs, so any library of that name satisfies the linker.
//!
//! If a CUDA installation has the library, it is used: another crate of the program may link it too and need all of it, as cudarc with
//! `dynamic-linking` does, and search paths in `target` come before all others. Otherwise the library is an empty archive.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

/// Variables that name installations, as the build scripts of `cust` and cudarc read them.
const ROOTS: [&str; 5] =
    ["CUDA_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR"];
/// Other usual folders of installations.
const USUAL: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];
/// Folders of an installation in which the library may lie.
const FOLDERS: [&str; 9] = [
    "",
    "lib64/stubs",
    "lib64",
    "lib/stubs",
    "lib",
    "targets/x86_64-linux/lib/stubs",
    "targets/sbsa-linux/lib/stubs",
    "lib/x86_64-linux-gnu",
    "lib/x64",
];

/// The folder of the first library `name` found in an installation.
fn installed(name: &str) -> Option<PathBuf> {
    let named = ROOTS.iter().filter_map(env::var_os);
    let named: Vec<PathBuf> = named.flat_map(|paths| env::split_paths(&paths).collect::<Vec<_>>()).collect();
    let roots = named.iter().map(PathBuf::as_path).chain(USUAL.iter().map(Path::new));
    let mut folders = roots.flat_map(|root| FOLDERS.map(|folder| root.join(folder)));
    folders.find(|folder| folder.is_absolute() && folder.join(name).is_file())
}

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    ROOTS.iter().for_each(|name| println!("cargo:rerun-if-env-changed={name}"));
    let of = |name| env::var(name).unwrap_or_default();
    let (system, linker) = (of("CARGO_CFG_TARGET_OS"), of("CARGO_CFG_TARGET_ENV"));
    let (shared, archive) = match (&*system, &*linker) {
        ("windows", "msvc") => ("cuda.lib", "cuda.lib"),
        _ => ("libcuda.so", "libcuda.a"),
    };
    // An installation is for the building machine, so it is used only if that is the target.
    let folder = if of("TARGET") == of("HOST") { installed(shared) } else { None };
    let folder = match folder {
        Some(folder) => folder,
        None => {
            let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
            fs::write(out.join(archive), "!<arch>\n")?;
            out
        }
    };
    println!("cargo:rustc-link-search=native={}", folder.display());
    Ok(())
}
