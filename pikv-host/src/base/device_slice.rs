//! Tensors of an engine that lie on the cache's device.

use pikv_core::dtype::Dtype;

/// Elements of one dtype in the memory of the device that a cache lies on, side by side: a tensor of the engine's. It is an address, as
/// the driver's `CUdeviceptr`; the memory stays the engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    address: u64,
    len: usize,
    dtype: Dtype,
}

impl DeviceSlice {
    /// `len` elements in `dtype` from `address` on, which is a multiple of an element's bytes: 4 of [`Dtype::F32`], 2 of the others.
    ///
    /// # Safety
    /// From a call that is given the slice until the stream of the cache's back end ([`Backend::stream`](crate::Backend::stream)) has
    /// passed what the call put on it:
    ///
    /// * the memory is `len` such elements of the back end's device, of one allocation or mapping, and stays;
    /// * where the call reads it, it was written by work that the stream is behind (put on the same stream before, or waited for by
    ///   it), and nobody writes it;
    /// * where the call writes it ([`DeviceOutput`]), nobody else reads or writes it.
    ///
    /// Length, alignment, a null address and memory of another device are checked by the call, as far as the driver knows of them.
    pub const unsafe fn new(address: u64, len: usize, dtype: Dtype) -> DeviceSlice {
        DeviceSlice { address, len, dtype }
    }

    /// Its address.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Some of its elements, which it has.
    #[cfg(feature = "cuda")]
    pub(crate) const fn part(&self, first: usize, len: usize) -> DeviceSlice {
        let address = self.address + (first * self.dtype.bits() as usize / 8) as u64;
        DeviceSlice { address, len, ..*self }
    }

    #[cfg(feature = "cuda")]
    pub(crate) const fn bytes(&self) -> usize {
        self.len * self.dtype.bits() as usize / 8
    }

    /// What its elements are.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }
}

/// Where results go on the device; [`Output`](crate::attend::options::Output) there.
#[derive(Clone, Copy, Debug)]
pub struct DeviceOutput {
    pub(crate) out: DeviceSlice,
    pub(crate) lse: Option<DeviceSlice>,
}

impl DeviceOutput {
    /// Attention output, `[rows][query_heads][v_dim]`, rounded to nearest even in the dtype of `out`. A row that sees nothing gets zeros.
    pub const fn new(out: DeviceSlice) -> DeviceOutput {
        DeviceOutput { out, lse: None }
    }

    /// Also the natural log-sum-exp of the scaled logits, `[rows][query_heads]` in f32; -inf for a row that sees nothing.
    pub const fn lse(mut self, lse: DeviceSlice) -> DeviceOutput {
        self.lse = Some(lse);
        self
    }
}

/// Where a device left the experts of a step's rows: [`LoopStep::route_device`](crate::closed_loop::LoopStep::route_device). The memory is
/// the loop's, and on the device. It is written by work on the back end's stream, and stays as it is until the layer is routed again, in
/// another step, or the loop is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceRoutes {
    /// What the model mixes: its own top-k, or the filing where the router's `model_choice` is set.
    pub model: DeviceExperts,
    /// What KV is filed under: the router's ranking. The same memory as `model` where the two are the same.
    pub filing: DeviceExperts,
    /// Rows of the step.
    pub rows: usize,
    /// Experts of a row.
    pub top_k: usize,
}

/// Addresses of experts and of their weights in memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceExperts {
    /// `[rows][top_k]` u32, the best first.
    pub experts: u64,
    /// `[rows][top_k]` f32, of the same experts: the softmax over the row's chosen raw logits.
    pub weights: u64,
}
