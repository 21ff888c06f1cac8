//! Device tensors of a call.

use crate::base::device_slice::DeviceSlice;
use crate::base::error::Error;
use crate::device::Device;
use crate::device::driver::bare;
use cust::sys;
use pikv_core::dtype::Dtype;
use pikv_kernels::args::TensorArg;

impl From<DeviceSlice> for TensorArg {
    fn from(slice: DeviceSlice) -> Self {
        TensorArg::new(slice.address(), slice.dtype())
    }
}

impl Device {
    /// Fills a tensor with 0.
    pub fn zero(&self, slice: DeviceSlice) -> Result<(), Error> {
        if slice.dtype() == Dtype::F32 {
            return Ok(self.fill(slice.address(), 0, slice.len() as u32)?);
        }
        self.enter()?;
        // SAFETY: the caller's tensor of 16-bit elements, which stays allocated until the stream has passed; a fill needs nothing else.
        let code = unsafe { sys::cuMemsetD16Async(slice.address(), 0, slice.len(), self.stream.handle()) };
        Ok(bare("cuMemsetD16Async", code)?)
    }

    /// [`Device::check`] for log-sum-exps, which must be f32.
    ///
    /// # Errors
    /// [`Error::DeviceTensor`].
    pub fn check_lse(&self, slice: DeviceSlice) -> Result<(), Error> {
        self.check_wide("lse", slice, "log-sum-exps are f32")
    }

    /// [`Device::check`] for a gate's logits, which must be f32.
    ///
    /// # Errors
    /// [`Error::DeviceTensor`].
    pub fn check_logits(&self, slice: DeviceSlice) -> Result<(), Error> {
        self.check_wide("logits", slice, "logits are f32")
    }

    fn check_wide(&self, what: &'static str, slice: DeviceSlice, why: &'static str) -> Result<(), Error> {
        if slice.dtype() != Dtype::F32 {
            return Err(Error::DeviceTensor { what, address: slice.address(), why });
        }
        self.check(what, slice)
    }

    /// Checks that kernels can read and write a tensor, as far as the driver knows.
    ///
    /// # Errors
    /// [`Error::DeviceTensor`] with the reason.
    pub fn check(&self, what: &'static str, slice: DeviceSlice) -> Result<(), Error> {
        let address = slice.address();
        let refused = |why| Err(Error::DeviceTensor { what, address, why });
        if address == 0 {
            return refused("the address is null");
        }
        if !address.is_multiple_of(u64::from(slice.dtype().bits() / 8)) {
            return refused(match slice.dtype() {
                Dtype::F32 => "f32 lie at multiples of 4",
                _ => "f16 and bf16 lie at multiples of 2",
            });
        }
        if slice.len() > u32::MAX as usize {
            return refused("a tensor of 2^32 elements or more; make the step shorter");
        }
        let mut ordinal = 0u32;
        let attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: `ordinal` has the type of the attribute; the driver looks the address up, and reads nothing there.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address) };
        match code {
            sys::cudaError_enum::CUDA_ERROR_INVALID_VALUE => refused("the driver knows no memory there"),
            code => match bare("cuPointerGetAttribute", code) {
                Ok(()) if ordinal == self.ordinal => Ok(()),
                Ok(()) => refused("memory of another device than the cache's"),
                Err(error) => Err(error.into()),
            },
        }
    }
}
