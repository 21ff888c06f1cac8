//! Streams and events, as handles of the driver: cust has no form for a stream that somebody else made, and its events are consumed
//! by the stream that waits for them.

use crate::base::error::CudaError;
use crate::device::driver::bare;
use cust::sys;
use std::ffi::c_void;
use std::ptr::null_mut;

/// A stream: one of its own, or somebody else's.
#[derive(Debug)]
pub struct Stream {
    handle: sys::CUstream,
    own: bool,
}

// SAFETY: a handle, which the driver takes from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new one, which does not wait for the default stream.
    pub fn new() -> Result<Stream, CudaError> {
        let mut handle = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a place for a handle.
        let code = unsafe { sys::cuStreamCreateWithPriority(&mut handle, flags, 0) };
        bare("cuStreamCreateWithPriority", code)?;
        Ok(Stream { handle, own: true })
    }

    /// Somebody else's.
    ///
    /// # Safety
    /// It is a stream of the device's primary context, or null, and outlives this.
    pub unsafe fn of(handle: *mut c_void) -> Stream {
        Stream { handle: handle.cast(), own: false }
    }

    pub fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Copies words up.
    ///
    /// # Safety
    /// There must be room for them at `to`, in memory of the device, and they must stay as they are until the stream has passed.
    pub unsafe fn up(&self, to: u64, words: &[u32]) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let code =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, words.as_ptr().cast(), size_of_val(words), self.handle) };
        bare("cuMemcpyHtoDAsync", code)
    }

    /// Copies bytes down from several places, one after the other, each to words of its own.
    ///
    /// # Safety
    /// The places must be memory of the device, `to` as long as all of them, and nobody may read or write there until the stream has
    /// passed.
    pub unsafe fn down(
        &self,
        places: impl Iterator<Item = (u64, usize)>,
        mut to: &mut [u32],
    ) -> Result<(), CudaError> {
        for (address, bytes) in places.filter(|(_, bytes)| *bytes > 0) {
            let (now, rest) = to.split_at_mut(bytes.div_ceil(4));
            to = rest;
            // SAFETY: the caller's promise.
            let code =
                unsafe { sys::cuMemcpyDtoHAsync_v2(now.as_mut_ptr().cast(), address, bytes, self.handle) };
            bare("cuMemcpyDtoHAsync", code)?;
        }
        Ok(())
    }

    /// Waits until all that was put on it is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: a stream that lives.
        bare("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.own {
            // SAFETY: from `cuStreamCreateWithPriority`, once. A lost device refuses, and has lost it with everything else.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// A place in a stream: an event without times. One that was never put anywhere has passed.
#[derive(Debug)]
pub struct Moment(sys::CUevent);

// SAFETY: a handle, which the driver takes from any thread.
unsafe impl Send for Moment {}
// SAFETY: as above.
unsafe impl Sync for Moment {}

impl Moment {
    pub fn new() -> Result<Moment, CudaError> {
        let mut event = null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a place for a handle.
        bare("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Moment(event))
    }

    /// Puts it behind all that was put on `stream` so far.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: handles that live.
        bare("cuEventRecord", unsafe { sys::cuEventRecord(self.0, stream.handle) })
    }

    /// Whether it has passed.
    pub fn passed(&self) -> Result<bool, CudaError> {
        // SAFETY: a handle that lives.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::cudaError_enum::CUDA_ERROR_NOT_READY => Ok(false),
            code => bare("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits for it, unless it has passed.
    pub fn wait(&self) -> Result<(), CudaError> {
        if self.passed()? {
            return Ok(());
        }
        // SAFETY: as above.
        bare("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.0) })
    }

    /// Has what is put on `stream` from here on wait for it.
    pub fn before(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: as above.
        bare("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.handle, self.0, 0) })
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        // SAFETY: from `cuEventCreate`, once. A lost device refuses, and has lost it with everything else.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
