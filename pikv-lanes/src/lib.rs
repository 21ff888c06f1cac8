//! Lanes of CPUs, and the kernels that run on them.
//!
//! [`Lanes`] lists the lanes, detects those of this machine, and runs a [`Kernel`] on them. The other modules hold pikv's
//! own kernels, each behind a plain function or a `run(lanes)` method: this crate compiles them once for every kind of lanes, so
//! that crates above it compile none.
#![deny(missing_docs)]

pub mod attend;
pub mod bounds;
pub mod mass;
pub mod merge;
pub mod pack;
pub mod product;
pub mod route;
pub mod tile;

/// Methods of [`Warp`] on lanes that are parked in memory, in an implementation whose `Slot` is a `[f32; LANES]` in a struct. They are no
/// default methods, whose bodies must compile for every `Slot`: that of a device is a register.
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
macro_rules! parked_in_memory {
    () => {
        #[inline(always)]
        fn lane(self, a: Self::F, i: usize) -> f32 {
            self.park(a).0[i]
        }
        #[inline(always)]
        fn park(self, a: Self::F) -> Self::Slot {
            let mut s = Slot([0.0; LANES]);
            self.store(a, &mut s.0);
            s
        }
        #[inline(always)]
        fn unpark(self, s: &Self::Slot) -> Self::F {
            self.load_f(&s.0)
        }
        #[inline(always)]
        fn bcast(self, s: &Self::Slot, i: usize) -> Self::F {
            self.splat(s.0[i])
        }
        #[inline(always)]
        fn spread(self, s: &Self::Slot, first: usize, width: usize) -> Self::F {
            self.spread_row(&s.0, first, width)
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
pub use self::neon::Neon;
#[cfg(target_arch = "x86_64")]
pub use self::{avx2::Avx2, avx512::Avx512};

use pikv_core::{
    portable::Portable,
    warp::{Kernel, Warp},
};

/// Lanes that this machine can run.
///
/// The variants of x86-64 hold a value that exists only where their instruction set was detected, so a `Lanes` can
/// always [`run`](Lanes::run).
///
/// ```
/// # mod pikv { pub use pikv_lanes as lanes; }
/// use pikv::lanes::Lanes;
/// let best = Lanes::detect();
/// assert_eq!(Lanes::by_name(best.name()).unwrap(), best);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lanes {
    /// Plain arrays; on any machine.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// NEON, which every aarch64 processor has.
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Neon,
}

/// Why lanes are not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LanesError {
    /// No lanes of this name run on this machine.
    #[error("no lanes named {asked:?} on this machine; available: {}", available.join(", "))]
    Unavailable {
        /// The name asked for.
        asked: String,
        /// Names of the lanes of this machine, fastest first.
        available: Vec<&'static str>,
    },
}

/// Prefetches a value, a cache line of 64 bytes at a time, if the CPU has an instruction for it.
#[inline(always)]
pub fn fetch<T>(value: &T) {
    let address = std::ptr::from_ref(value).cast::<u8>();
    (0..size_of::<T>()).step_by(64).for_each(|at| fetch_line(address.wrapping_add(at)));
}

/// Prefetches the cache line of an address, which need not be valid, if the CPU has an instruction for it.
#[inline(always)]
pub fn fetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch needs SSE alone, is a hint on any address, and changes nothing; the address is not dereferenced.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    neon::fetch_line(address);
    #[cfg(not(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little"))))]
    let _ = address;
}

impl Lanes {
    /// The fastest lanes of this machine.
    pub fn detect() -> Self {
        Self::available().next().unwrap_or(Self::Portable)
    }

    /// All lanes of this machine, fastest first.
    pub fn available() -> impl Iterator<Item = Self> {
        [
            #[cfg(target_arch = "x86_64")]
            Avx512::new().map(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            Avx2::new().map(Self::Avx2),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Some(Self::Neon),
            Some(Self::Portable),
        ]
        .into_iter()
        .flatten()
    }

    /// The lanes called `name`: `"portable"`, `"avx2"`, `"avx512"` or `"neon"`.
    ///
    /// # Errors
    /// [`LanesError::Unavailable`] if no lanes have that name, or this machine does not run them.
    pub fn by_name(name: &str) -> Result<Self, LanesError> {
        Self::available().find(|l| l.name() == name).ok_or_else(|| LanesError::Unavailable {
            asked: name.to_owned(),
            available: Self::available().map(Self::name).collect(),
        })
    }

    /// Name of these lanes, as [`Lanes::by_name`] takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => Portable::NAME,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::NAME,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::NAME,
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon => Neon::NAME,
        }
    }

    /// [`Warp::ROWS`] of these lanes.
    pub fn rows(self) -> usize {
        match self {
            Self::Portable => Portable::ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::ROWS,
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon => Neon::ROWS,
        }
    }

    /// Whether these lanes have sums of products of bf16, which [`Common::rounded`](attend::Common::rounded) is for.
    pub fn multiplies_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return tile::Bf16Pairs::of(self).is_some();
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Runs `k` on these lanes, compiled with their instruction set.
    #[inline]
    pub fn run<K: Kernel>(self, k: K) -> K::Out {
        match self {
            Self::Portable => k.run(Portable),
            // SAFETY: an `Avx2` exists only where `Avx2::new` detected every feature that `run_avx2` enables.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(w) => unsafe { run_avx2(w, k) },
            // SAFETY: an `Avx512` exists only where `Avx512::new` detected every feature that `run_avx512`
            // enables.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(w) => unsafe { run_avx512(w, k) },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon => k.run(Neon),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<K: Kernel>(w: Avx2, k: K) -> K::Out {
    k.run(w)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
fn run_avx512<K: Kernel>(w: Avx512, k: K) -> K::Out {
    k.run(w)
}

/// A gather lane by lane: for tables that 32-bit signed indices cannot span, and to panic at the bad index.
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
#[cold]
#[inline(never)]
fn gather_checked(table: &[f32], index: &[u32; pikv_core::warp::LANES]) -> [f32; pikv_core::warp::LANES] {
    index.map(|i| table[i as usize])
}
