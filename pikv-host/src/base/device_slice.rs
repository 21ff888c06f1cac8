//! Tensors on the cache's device.

use pikv_core::dtype::Dtype;

/// Contiguous elements of one dtype in the memory of the cache's device: a tensor of the engine. It holds an address (the driver's
/// `CUdeviceptr`), and the engine keeps ownership of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    address: u64,
    len: usize,
    dtype: Dtype,
}

impl DeviceSlice {
    /// `len` elements in `dtype` from `address` on, which is a multiple of the element size: 4 bytes for [`Dtype::F32`], 2 for the others.
    ///
    /// # Safety
    /// From a call with the slice until the stream of the cache's back end ([`Backend::stream`](crate::Backend::stream)) has completed the
    /// call's work:
    ///
    /// * the memory is `len` such elements of the back end's device, in one allocation or mapping, and stays allocated;
    /// * if the call reads it, it was written by work ordered before the call on that stream (enqueued on it before, or waited for by
    ///   it), and nothing writes it;
    /// * if the call writes it ([`DeviceOutput`]), nothing else reads or writes it.
    ///
    /// The call checks length, alignment, null addresses and memory of other devices, as far as the driver knows them.
    pub const unsafe fn new(address: u64, len: usize, dtype: Dtype) -> DeviceSlice {
        DeviceSlice { address, len, dtype }
    }

    /// Device address.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `len` elements from `first` on; the slice must have them.
    pub(crate) const fn part(&self, first: usize, len: usize) -> DeviceSlice {
        let address = self.address + (first * self.dtype.bits() as usize / 8) as u64;
        DeviceSlice { address, len, ..*self }
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.len * self.dtype.bits() as usize / 8
    }

    /// Dtype of the elements.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }
}

/// Outputs of attention on the device; the counterpart of [`AttendOutput`](crate::attend::options::AttendOutput).
#[derive(Clone, Copy, Debug)]
pub struct DeviceOutput {
    pub(crate) out: DeviceSlice,
    pub(crate) lse: Option<DeviceSlice>,
}

impl DeviceOutput {
    /// Attention output, `[rows][query_heads][v_dim]`, rounded to nearest even in the dtype of `out`. A row that sees no token gets zeros.
    pub const fn new(out: DeviceSlice) -> DeviceOutput {
        DeviceOutput { out, lse: None }
    }

    /// Also writes the natural log-sum-exp of the scaled logits, `[rows][query_heads]` in f32; -inf for a row that sees no token.
    pub const fn lse(mut self, lse: DeviceSlice) -> DeviceOutput {
        self.lse = Some(lse);
        self
    }
}

/// Experts of a step's rows in memory of the device: the result of
/// [`LoopStep::route_device`](crate::closed_loop::LoopStep::route_device). The loop owns the memory. Work on the back end's stream writes
/// it, and it stays valid until the layer is routed again in another step or the loop is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceRoutes {
    /// Experts for the model to mix: its own top-k, or `filing` if the router's `model_choice` is set.
    pub model: DeviceExperts,
    /// Experts under which KV is filed: the router's ranking. The same memory as `model` if the two are equal.
    pub filing: DeviceExperts,
    /// Rows of the step.
    pub rows: usize,
    /// Experts of each row.
    pub top_k: usize,
}

/// Device addresses of experts and of their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceExperts {
    /// `[rows][top_k]` u32, best first.
    pub experts: u64,
    /// `[rows][top_k]` f32, of the same experts: the softmax over the row's chosen raw logits.
    pub weights: u64,
}
