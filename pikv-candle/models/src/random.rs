//! Random weights.

use candle::{DType, Device, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;

/// Random weights, the same for the same name: a matrix is scaled to keep the length of rows, a norm's weights are around 1.
pub fn weights(dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Noise), dtype, Device::Cpu)
}

struct Noise;

impl SimpleBackend for Noise {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut x = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |x, byte| (x ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let mut noise = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let (middle, scale) = match shape.dims() {
            [_, width] => (0.0, (3.0 / *width as f32).sqrt()),
            _ => (1.0, 0.1),
        };
        let values: Vec<f32> = (0..shape.elem_count()).map(|_| middle + scale * noise()).collect();
        Tensor::from_vec(values, shape, device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle::bail!("{name}: no shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}
