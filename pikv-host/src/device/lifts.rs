//! Memory in which pages come up to the device, on a stream of their own, and which is used again.

use super::stream::{Moment, Stream};
use crate::base::error::CudaError;
use crate::device::memory::{Memory, Pinned};
use std::sync::Mutex;

/// The stream, and what was brought up in and may be used again.
#[derive(Debug)]
pub struct Lifts {
    pub spare: Mutex<Vec<Lift>>,
    pub stream: Stream,
}

/// A batch of pages in memory of the device, and in the pinned memory that they come from.
#[derive(Debug)]
pub struct Lift {
    pub host: Pinned,
    pub memory: Memory,
    /// After the copy.
    pub done: Moment,
    /// After what read it last, on the device's own stream.
    pub read: Option<Moment>,
}

impl Lift {
    /// Whether nothing reads it any more, so that it need not be waited for.
    pub fn is_over(&self) -> bool {
        self.read.as_ref().is_none_or(|read| read.passed().is_ok_and(|passed| passed))
    }
}

impl Lifts {
    pub fn new() -> Result<Lifts, CudaError> {
        Ok(Lifts { spare: Mutex::default(), stream: Stream::new()? })
    }
}
