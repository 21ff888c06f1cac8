//! Pages in the memory of a CUDA device.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod compact;
#[cfg(feature = "cuda")]
mod pending;

#[cfg(not(feature = "cuda"))]
pub(crate) use absent::Pending;
#[cfg(feature = "cuda")]
pub(crate) use pending::Pending;

/// A move of a token from a lane of a page to a lane of a page of the result.
pub(crate) struct MovedToken {
    pub source: u64,
    pub from: u32,
    /// Index of the page in the result.
    pub at: usize,
    pub to: u32,
    /// Address of that page.
    pub target: u64,
}
