//! Modules of kernels in a device's context, each loaded when it is first needed.

use crate::base::error::CudaError;
use crate::device::driver::bare;
use crate::device::kernels::{self, Kernel, Module};
use cust::sys;
use pikv_kernels::ptx;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Bytes of the driver's log that are kept.
const LOG: usize = 8 << 10;

/// A handle of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Function(pub sys::CUfunction);

// SAFETY: a handle of a function in a module, which any thread may launch.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The modules that are loaded. They are unloaded in the context that is current when this is dropped.
#[derive(Debug, Default)]
pub struct Modules {
    loaded: [OnceLock<Loaded>; Module::ALL.len()],
    /// Modules that the driver does not compile, and its answers. Locked while a module loads, so that none is compiled twice.
    refused: Mutex<Vec<(Module, CudaError)>>,
}

/// A module of the driver, and its kernels in their order.
#[derive(Debug)]
struct Loaded {
    functions: Vec<Function>,
    _module: Handle,
}

/// A module, which is unloaded when this is dropped.
#[derive(Debug)]
struct Handle(sys::CUmodule);

// SAFETY: a handle, which any thread may use.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Modules {
    /// The handle of a kernel, whose module is loaded if it is not. The device's context is current.
    ///
    /// # Errors
    /// The errors of [`Modules::load`].
    pub fn function(&self, kernel: Kernel) -> Result<Function, CudaError> {
        Ok(self.loaded(kernel.module())?.functions[kernel.place()])
    }

    /// Whether a module is loaded.
    pub fn is_loaded(&self, module: Module) -> bool {
        self.loaded[module as usize].get().is_some()
    }

    /// Loads a module, unless it is loaded. The device's context is current. Where the driver's cache does not have it, the driver compiles
    /// it on this thread, for seconds.
    ///
    /// # Errors
    /// [`CudaError::Module`]. If the driver does not compile the text, later calls return the same error at once.
    pub fn load(&self, module: Module) -> Result<(), CudaError> {
        self.loaded(module).map(|_| ())
    }

    fn loaded(&self, module: Module) -> Result<&Loaded, CudaError> {
        let loaded = &self.loaded[module as usize];
        if let Some(loaded) = loaded.get() {
            return Ok(loaded);
        }
        // A thread that panicked left the list as it was.
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = loaded.get() {
            return Ok(loaded);
        }
        if let Some((_, error)) = refused.iter().find(|(of, _)| *of == module) {
            return Err(error.clone());
        }
        match load(module) {
            Ok(new) => Ok(loaded.get_or_init(|| new)),
            Err(error) => {
                if stays(&error) {
                    refused.push((module, error.clone()));
                }
                Err(error)
            }
        }
    }
}

/// Loads a module of the PTX and finds its kernels.
fn load(module: Module) -> Result<Loaded, CudaError> {
    let handle = compile(kernels::text(ptx::TEXT, module), module.name())?;
    let functions =
        module.kernels().iter().map(|kernel| handle.function(kernel.entry())).collect::<Result<_, _>>()?;
    Ok(Loaded { functions, _module: handle })
}

/// Loads a text into the current context. `name` is for the error.
fn compile(mut text: String, name: &'static str) -> Result<Handle, CudaError> {
    text.push('\0');
    let mut log = [0u8; LOG];
    // The last byte stays 0, so that the log ends whatever the driver writes.
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG - 1)];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut module = ptr::null_mut();
    // SAFETY: the text ends in a 0; the two options have their values, of which the first has room for as many bytes as
    // the second says. The driver keeps none of the pointers.
    let code = unsafe {
        let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
        sys::cuModuleLoadDataEx(&raw mut module, text.as_ptr().cast(), 2, options, values)
    };
    if code == sys::cudaError_enum::CUDA_SUCCESS {
        return Ok(Handle(module));
    }
    let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
    Err(CudaError::Module {
        module: name,
        code: code as u32,
        name: format!("{code:?}"),
        log: log.trim().to_owned(),
    })
}

/// Whether an answer is about the text and the driver's compiler, so that it would be the same if it were asked again.
fn stays(error: &CudaError) -> bool {
    use sys::cudaError_enum::{
        CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_INVALID_SOURCE,
        CUDA_ERROR_JIT_COMPILATION_DISABLED, CUDA_ERROR_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    };
    let all = [
        CUDA_ERROR_INVALID_IMAGE,
        CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUDA_ERROR_INVALID_PTX,
        CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUDA_ERROR_JIT_COMPILATION_DISABLED,
        CUDA_ERROR_INVALID_SOURCE,
    ];
    matches!(error, CudaError::Module { code, .. } if all.iter().any(|of| *of as u32 == *code))
}

impl Handle {
    fn function(&self, entry: &str) -> Result<Function, CudaError> {
        let entry = [entry.as_bytes(), &[0]].concat();
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, and the name ends in a 0.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut function, self.0, entry.as_ptr().cast()) };
        bare("cuModuleGetFunction", code)?;
        Ok(Function(function))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A lost device has nothing to unload, so the answer does not matter.
        // SAFETY: the module is loaded and unloaded once; its kernels have ended, as the device waits for its stream before it is dropped.
        let _ = unsafe { sys::cuModuleUnload(self.0) };
    }
}
