//! Reused device buffers for pages from lower tiers, and the stream of their copies.

use super::stream::{Event, Stream};
use crate::base::error::CudaError;
use crate::device::memory::{Memory, Pinned};
use std::sync::Mutex;

/// The stream, and buffers for reuse.
#[derive(Debug)]
pub struct UploadBufferPool {
    pub spare: Mutex<Vec<UploadBuffers>>,
    pub stream: Stream,
}

/// Buffers of a batch of pages: device memory, and the pinned memory that it is copied from.
#[derive(Debug)]
pub struct UploadBuffers {
    pub host: Pinned,
    pub memory: Memory,
    /// After the copy.
    pub done: Event,
    /// After the last kernel that reads the buffer, on the device's main stream.
    pub read: Option<Event>,
}

impl UploadBuffers {
    /// Whether no kernel reads the buffer any more, so that reuse needs no wait.
    pub fn is_over(&self) -> bool {
        self.read.as_ref().is_none_or(|read| read.passed().is_ok_and(|passed| passed))
    }
}

impl UploadBufferPool {
    pub fn new() -> Result<UploadBufferPool, CudaError> {
        Ok(UploadBufferPool { spare: Mutex::default(), stream: Stream::new()? })
    }
}
