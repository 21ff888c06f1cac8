//! Tensors in host memory, in any dtype.

use crate::base::parallel::Shared;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pikv_core::dtype::Dtype;
use pikv_core::page::MAX_DIM;

/// Element type of a tensor in host memory: `f32`, or `f16` or `bf16` of the crate `half`, version 2. In calls with such slices
/// ([`Step::append`](crate::Step::append), [`Step::attend`](crate::Step::attend), [`AttendOutput::new`](crate::AttendOutput::new),
/// [`LoopStep::route`](crate::closed_loop::LoopStep::route)) each tensor can have its own type.
///
/// Inputs are widened to f32 row by row, which is exact, so results have the bits of f32 tensors: keys and values are stored in the
/// layer's dtypes, and no tensor is copied as a whole. Results are rounded to nearest even when they are written. The trait is
/// sealed.
///
/// ```
/// # use pikv_host as pikv;
/// use half::{bf16, f16};
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Scalar};
///
/// // An engine's own function, for tensors of any of the three.
/// fn layer<T: Scalar>(step: &mut pikv::Step<'_>, q: &[T], k: &[T], v: &[T], out: &mut [T]) -> Result<(), pikv::Error> {
///     step.append(0, k, v)?;
///     step.attend(0, q, &Attend::new(0.5), AttendOutput::new(out))
/// }
///
/// let cache = Cache::new(CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::Bf16)], 1 << 20))?;
/// let mut sequence = cache.sequence();
/// let mut step = cache.begin([(&mut sequence, 1)])?;
/// let (one, mut out) = (bf16::ONE, [bf16::ZERO; 8]);
/// layer(&mut step, &[one; 8], &[one; 4], &[one; 4], &mut out)?;
/// assert_eq!((out, bf16::DTYPE), ([one; 8], Dtype::Bf16));
///
/// // Of the same layer also results in another dtype than that of the queries.
/// let mut out = [f16::ZERO; 8];
/// step.attend(0, &[1.0; 8], &Attend::new(0.5), AttendOutput::new(&mut out))?;
/// assert_eq!(out, [f16::ONE; 8]);
/// # Ok::<(), pikv::Error>(())
/// ```
pub trait Scalar: sealed::Slices {
    /// The element type as a value.
    const DTYPE: Dtype;
}

mod sealed {
    use super::{HostSlice, HostSliceMut};

    /// Conversion to slices with a dtype at run time.
    pub trait Slices: Copy + Default + Send + Sync + 'static {
        fn host(of: &[Self]) -> HostSlice<'_>;
        fn host_mut(of: &mut [Self]) -> HostSliceMut<'_>;
    }
}

macro_rules! scalar {
    ($type:ty, $dtype:ident) => {
        impl Scalar for $type {
            const DTYPE: Dtype = Dtype::$dtype;
        }

        impl sealed::Slices for $type {
            fn host(of: &[Self]) -> HostSlice<'_> {
                HostSlice::$dtype(of)
            }
            fn host_mut(of: &mut [Self]) -> HostSliceMut<'_> {
                HostSliceMut::$dtype(of)
            }
        }
    };
}
scalar!(f32, F32);
scalar!(f16, F16);
scalar!(bf16, Bf16);

/// A slice to read.
#[derive(Clone, Copy, Debug)]
pub enum HostSlice<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> HostSlice<'a> {
    pub fn of<T: Scalar>(slice: &'a [T]) -> HostSlice<'a> {
        T::host(slice)
    }

    pub fn len(self) -> usize {
        match self {
            HostSlice::F32(of) => of.len(),
            HostSlice::F16(of) => of.len(),
            HostSlice::Bf16(of) => of.len(),
        }
    }

    /// `n` elements from index `at`.
    pub fn part(self, at: usize, n: usize) -> HostSlice<'a> {
        match self {
            HostSlice::F32(of) => HostSlice::F32(&of[at..][..n]),
            HostSlice::F16(of) => HostSlice::F16(&of[at..][..n]),
            HostSlice::Bf16(of) => HostSlice::Bf16(&of[at..][..n]),
        }
    }

    /// Writes the elements as f32 to `out`, which has the same length.
    pub fn widen(self, out: &mut [f32]) {
        match self {
            HostSlice::F32(of) => out.copy_from_slice(of),
            HostSlice::F16(of) => of.convert_to_f32_slice(out),
            HostSlice::Bf16(of) => of.convert_to_f32_slice(out),
        }
    }

    /// The elements as f32: the slice itself, or a copy in `room`.
    pub fn wide<'r>(self, room: &'r mut Vec<f32>) -> &'r [f32]
    where
        'a: 'r,
    {
        if let HostSlice::F32(of) = self {
            return of;
        }
        room.resize(self.len(), 0.0);
        self.widen(room);
        room
    }

    /// Appends the elements as f32 to a list.
    pub fn extend(self, list: &mut Vec<f32>) {
        let from = list.len();
        list.resize(from + self.len(), 0.0);
        self.widen(&mut list[from..]);
    }

    /// Index and value of the first element that is not finite.
    pub fn wild(self) -> Option<(usize, f32)> {
        match self {
            HostSlice::F32(of) => of.iter().position(|x| !x.is_finite()).map(|at| (at, of[at])),
            HostSlice::F16(of) => of.iter().position(|x| !x.is_finite()).map(|at| (at, of[at].to_f32())),
            HostSlice::Bf16(of) => of.iter().position(|x| !x.is_finite()).map(|at| (at, of[at].to_f32())),
        }
    }
}

/// A slice to write.
#[derive(Debug)]
pub enum HostSliceMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

impl<'a> HostSliceMut<'a> {
    pub fn of<T: Scalar>(slice: &'a mut [T]) -> HostSliceMut<'a> {
        T::host_mut(slice)
    }

    pub fn len(&self) -> usize {
        match self {
            HostSliceMut::F32(of) => of.len(),
            HostSliceMut::F16(of) => of.len(),
            HostSliceMut::Bf16(of) => of.len(),
        }
    }

    pub fn dtype(&self) -> Dtype {
        match self {
            HostSliceMut::F32(_) => Dtype::F32,
            HostSliceMut::F16(_) => Dtype::F16,
            HostSliceMut::Bf16(_) => Dtype::Bf16,
        }
    }

    /// `n` elements from index `at`.
    pub fn part(&mut self, at: usize, n: usize) -> HostSliceMut<'_> {
        match self {
            HostSliceMut::F32(of) => HostSliceMut::F32(&mut of[at..][..n]),
            HostSliceMut::F16(of) => HostSliceMut::F16(&mut of[at..][..n]),
            HostSliceMut::Bf16(of) => HostSliceMut::Bf16(&mut of[at..][..n]),
        }
    }

    /// Writes all elements, rounded to nearest even. Returns the index and the unrounded value of the first that is not finite as written.
    pub fn write(&mut self, from: &[f32]) -> Option<(usize, f32)> {
        let wild = match self {
            HostSliceMut::F32(of) => {
                of.copy_from_slice(from);
                None
            }
            HostSliceMut::F16(of) => {
                of.convert_from_f32_slice(from);
                of.iter().position(|x| !x.is_finite())
            }
            HostSliceMut::Bf16(of) => {
                of.convert_from_f32_slice(from);
                of.iter().position(|x| !x.is_finite())
            }
        };
        wild.map(|at| (at, from[at]))
    }

    /// The slice for tasks that write disjoint rows.
    pub fn shared(&mut self) -> SharedRows<'_> {
        match self {
            HostSliceMut::F32(of) => SharedRows::F32(Shared::new(of)),
            HostSliceMut::F16(of) => SharedRows::F16(Shared::new(of)),
            HostSliceMut::Bf16(of) => SharedRows::Bf16(Shared::new(of)),
        }
    }
}

/// Rows of at most [`MAX_DIM`] elements for concurrent writes.
pub enum SharedRows<'a> {
    F32(Shared<'a, f32>),
    F16(Shared<'a, f16>),
    Bf16(Shared<'a, bf16>),
}

impl SharedRows<'_> {
    /// Calls `f` to write `n` elements from index `at` as f32, and rounds them to nearest even. Returns the index and the unrounded value
    /// of the first that is not finite as written.
    ///
    /// # Safety
    /// No other task may access these elements during the call.
    pub unsafe fn write(&self, at: usize, n: usize, f: impl FnOnce(&mut [f32])) -> Option<(usize, f32)> {
        // SAFETY: the caller's promise.
        let mut to = unsafe {
            match self {
                SharedRows::F32(of) => HostSliceMut::F32(of.part(at, n)),
                SharedRows::F16(of) => HostSliceMut::F16(of.part(at, n)),
                SharedRows::Bf16(of) => HostSliceMut::Bf16(of.part(at, n)),
            }
        };
        if let HostSliceMut::F32(row) = to {
            f(row);
            return None;
        }
        let mut room = [0.0; MAX_DIM as usize];
        let row = &mut room[..n];
        f(row);
        to.write(row).map(|(i, value)| (at + i, value))
    }
}
