//! Builds without the feature `cuda` have no devices: no value of these types exists, so no method is ever called.

use crate::base::error::{CudaError, Error};
use std::ffi::c_void;
use std::sync::Arc;

/// A device; there is none.
#[derive(Debug)]
pub(crate) enum Device {}

/// Memory of a device; there is none.
#[derive(Debug)]
pub(crate) enum PageMemory {}

impl PageMemory {
    pub fn address(&self) -> u64 {
        match *self {}
    }
}

impl Device {
    pub fn count() -> Result<u32, CudaError> {
        Err(CudaError::NotBuilt)
    }

    pub fn open(_ordinal: u32) -> Result<Device, CudaError> {
        Err(CudaError::NotBuilt)
    }

    /// # Safety
    /// None is needed.
    pub unsafe fn open_on(_ordinal: u32, _stream: *mut c_void) -> Result<Device, CudaError> {
        Err(CudaError::NotBuilt)
    }

    pub fn stream(&self) -> *mut c_void {
        match *self {}
    }

    pub fn allocate(self: &Arc<Self>, _bytes: u64) -> Result<PageMemory, Error> {
        match **self {}
    }

    pub fn fill(&self, _address: u64, _word: u32, _words: u32) -> Result<(), CudaError> {
        match *self {}
    }

    pub fn write(&self, _address: u64, _words: &[u32]) -> Result<(), Error> {
        match *self {}
    }

    pub fn read(&self, _address: u64, _words: u32) -> Result<Vec<u32>, Error> {
        match *self {}
    }

    pub fn read_all(&self, _places: &[(u64, usize)], _read: impl FnOnce(&[u32])) -> Result<(), Error> {
        match *self {}
    }
}
