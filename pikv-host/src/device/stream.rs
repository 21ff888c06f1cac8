//! Streams and events as raw handles of the driver: cust cannot wrap a foreign stream, and its `wait_event` consumes the event.

use crate::base::error::CudaError;
use crate::device::driver::bare;
use cust::sys;
use std::ffi::c_void;
use std::ptr::null_mut;

/// A stream: its own, or the caller's.
#[derive(Debug)]
pub struct Stream {
    handle: sys::CUstream,
    own: bool,
}

// SAFETY: a handle that the driver accepts from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream that does not synchronize with the default stream.
    pub fn new() -> Result<Stream, CudaError> {
        let mut handle = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `handle` is valid for the write.
        let code = unsafe { sys::cuStreamCreateWithPriority(&mut handle, flags, 0) };
        bare("cuStreamCreateWithPriority", code)?;
        Ok(Stream { handle, own: true })
    }

    /// Wraps the caller's stream.
    ///
    /// # Safety
    /// `handle` is a stream of the device's primary context, or null, and outlives this value.
    pub unsafe fn of(handle: *mut c_void) -> Stream {
        Stream { handle: handle.cast(), own: false }
    }

    pub fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Enqueues a copy of words to the device.
    ///
    /// # Safety
    /// `to` has room for them in memory of the device, and they must not change until the stream has passed.
    pub unsafe fn up(&self, to: u64, words: &[u32]) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let code =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, words.as_ptr().cast(), size_of_val(words), self.handle) };
        bare("cuMemcpyHtoDAsync", code)
    }

    /// Enqueues copies of bytes from several places to the host; each starts at a word of `to`.
    ///
    /// # Safety
    /// The places must be memory of the device, `to` as long as all of them, and nothing may read or write `to` until the stream has
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

    /// Waits for all enqueued work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: a live stream.
        bare("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.own {
            // SAFETY: from `cuStreamCreateWithPriority`, destroyed once. A lost device returns an error, and has lost the stream anyway.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// An event without timing, recorded in a stream. An event that was never recorded has passed.
#[derive(Debug)]
pub struct Event(sys::CUevent);

// SAFETY: a handle that the driver accepts from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub fn new() -> Result<Event, CudaError> {
        let mut event = null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `event` is valid for the write.
        bare("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Event(event))
    }

    /// Records the event after all work enqueued on `stream`.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: live handles.
        bare("cuEventRecord", unsafe { sys::cuEventRecord(self.0, stream.handle) })
    }

    /// Whether it has passed.
    pub fn passed(&self) -> Result<bool, CudaError> {
        // SAFETY: a live handle.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::cudaError_enum::CUDA_ERROR_NOT_READY => Ok(false),
            code => bare("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits for the event, unless it has passed.
    pub fn wait(&self) -> Result<(), CudaError> {
        if self.passed()? {
            return Ok(());
        }
        // SAFETY: as above.
        bare("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.0) })
    }

    /// Makes later work on `stream` wait for the event.
    pub fn before(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: as above.
        bare("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.handle, self.0, 0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: from `cuEventCreate`, destroyed once. A lost device returns an error, and has lost the event anyway.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
