//! Tensors in the order in which pikv reads them: token by token, in host memory.

use crate::Error;
use candle_core::{DType, Device, Tensor};

/// Dimensions that the tensors of a pass share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    pub batch: usize,
    pub tokens: usize,
}

impl Given {
    /// The dimensions of `q`.
    pub fn of(q: &Tensor) -> Result<Given, Error> {
        let (batch, _, tokens, _) = q.dims4()?;
        Ok(Given { batch, tokens })
    }

    /// Rows of a tensor of `heads` heads.
    pub fn rows(&self, what: &'static str, of: &Tensor, heads: usize, dim: usize) -> Result<Rows, Error> {
        let expected = [self.batch, heads, self.tokens, dim];
        if of.dims() != expected {
            return Err(Error::Shape { what, got: of.dims().to_vec(), expected: expected.to_vec() });
        }
        Rows::plain(what, &of.transpose(1, 2)?)
    }
}

/// A contiguous tensor in host memory, of f32, f16 or bf16.
#[derive(Debug)]
pub struct Rows(Tensor);

impl Rows {
    /// The tensor itself if it is contiguous, else a contiguous copy.
    pub fn plain(what: &'static str, of: &Tensor) -> Result<Rows, Error> {
        if !matches!(of.device(), Device::Cpu) {
            return Err(Error::Device { what });
        }
        match of.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => Ok(Rows(of.contiguous()?)),
            got => Err(Error::Dtype { what, got }),
        }
    }

    pub fn tensor(&self) -> &Tensor {
        &self.0
    }
}

/// Evaluates an expression with the elements of [`Rows`] as a slice of their type; its value is a `Result`.
macro_rules! rows {
    ($rows:expr, |$slice:ident| $use:expr) => {{
        let (storage, layout) = $rows.tensor().storage_and_layout();
        let (start, end) = layout.contiguous_offsets().unwrap_or_default();
        match &*storage {
            Storage::Cpu(CpuStorage::F32(of)) => {
                let $slice = &of[start..end];
                (|| Ok::<_, Error>($use?))()
            }
            Storage::Cpu(CpuStorage::F16(of)) => {
                let $slice = &of[start..end];
                (|| Ok::<_, Error>($use?))()
            }
            Storage::Cpu(CpuStorage::BF16(of)) => {
                let $slice = &of[start..end];
                (|| Ok::<_, Error>($use?))()
            }
            _ => Err(Error::Device { what: stringify!($rows) }),
        }
    }};
}
pub(crate) use rows;

/// `n` zeros of the element type of a slice.
pub fn zeros<T: Copy + Default>(_: &[T], n: usize) -> Vec<T> {
    vec![T::default(); n]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuStorage, Storage};

    /// Address of its first element.
    fn place(of: &Rows) -> usize {
        rows!(of, |x| Ok::<_, Error>(x.as_ptr().addr())).unwrap()
    }

    #[test]
    fn what_is_contiguous_token_by_token_is_not_copied() {
        let x = Tensor::arange(0f32, 4.0 * 3.0 * 2.0 * 5.0, &Device::Cpu).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let all = x.reshape((4, 3, 2, 5)).unwrap().to_dtype(dtype).unwrap();
            let of = |x: &Tensor| Given::of(x).unwrap().rows("x", x, x.dims()[1], 5).unwrap();
            let start = place(&Rows::plain("x", &all).unwrap());
            let size = dtype.size_in_bytes();
            assert_eq!(place(&of(&all.transpose(1, 2).unwrap())), start);
            // Part of a batch.
            let part = all.narrow(0, 1, 2).unwrap().transpose(1, 2).unwrap();
            assert_eq!(place(&of(&part)), start + 30 * size);
            // A single token: its heads follow each other either way.
            let one = all.narrow(0, 2, 1).unwrap().narrow(1, 1, 1).unwrap();
            assert_eq!(place(&of(&one.transpose(1, 2).unwrap())), start + (60 + 10) * size);
            let heads_first = one.transpose(1, 2).unwrap().contiguous().unwrap();
            assert_eq!(place(&of(&heads_first)), place(&Rows::plain("x", &heads_first).unwrap()));
            // Contiguous with heads before tokens: one copy.
            let turned = all.transpose(1, 2).unwrap().contiguous().unwrap();
            assert_ne!(place(&of(&turned)), place(&Rows::plain("x", &turned).unwrap()));
        }
    }
}
