//! The machine's limits, measured with the threads of the current rayon pool.

mod results;

#[allow(unused_imports, reason = "each bench uses some of them")]
pub use results::{median, name, provenance, replace_rows, when};

use memmap2::MmapMut;
use pikv::lanes::Lanes;
use pikv_core::warp::{Kernel, LANES, Warp};
use rayon::prelude::*;
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

/// Limits of some threads together.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Bytes read from memory, in 10^9 a second.
    pub read_gbps: f64,
    /// Independent f32 fused multiply-adds a second.
    pub fmas_per_s: f64,
}

/// Longer than any cache here.
const BUFFER: usize = 512 << 20;
const FMA_ROUNDS: usize = 1 << 18;

impl Machine {
    /// One sample of both.
    pub fn measure(lanes: Lanes) -> Machine {
        static DATA: OnceLock<MmapMut> = OnceLock::new();
        let data = DATA.get_or_init(buffer);
        let rows = bytemuck::cast_slice::<u8, [u32; LANES]>(data);
        let threads = rayon::current_num_threads();
        let start = Instant::now();
        // A few pieces a thread, so that the pieces of both end together.
        let sum: u32 = rows
            .par_chunks(rows.len() / threads / 4)
            .map(|rows| lanes.run(Read(rows)))
            .reduce(|| 0, |a, b| a | b);
        let read_gbps = BUFFER as f64 / start.elapsed().as_secs_f64() / 1e9;
        black_box(sum);
        Machine { read_gbps, fmas_per_s: fmas_per_s(lanes) }
    }
}

/// One sample of the independent f32 fused multiply-adds a second.
pub fn fmas_per_s(lanes: Lanes) -> f64 {
    let threads = rayon::current_num_threads();
    let start = Instant::now();
    let each: Vec<f32> = (0..threads).into_par_iter().with_max_len(1).map(|_| lanes.run(Fma)).collect();
    black_box(each);
    let fmas = (threads * FMA_ROUNDS * LANES * chains(lanes.rows())) as f64;
    fmas / start.elapsed().as_secs_f64()
}

/// Rows of lanes that are added to at once, of lanes whose registers hold `rows`: 2 of AVX2 would be 8 chains, only just as many as 2
/// units and 4 cycles take.
const fn chains(rows: usize) -> usize {
    if rows < 3 { 3 } else { rows }
}

/// In huge pages where the system has them, as pikv's arenas are.
fn buffer() -> MmapMut {
    let mut data = MmapMut::map_anon(BUFFER).expect("memory for the bandwidth measurement");
    #[cfg(target_os = "linux")]
    let _ = data.advise(memmap2::Advice::HugePage);
    data.fill(1);
    data
}

/// Loads of rows of words, and nothing else; every bit of the result is set if each lane has a number above 0 in some row.
pub struct Read<'a>(pub &'a [[u32; LANES]]);

impl Kernel for Read<'_> {
    type Out = u32;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> u32 {
        let mut a = [w.splat_u(0); 4];
        for rows in self.0.as_chunks::<4>().0 {
            for i in 0..4 {
                a[i] = w.or(a[i], w.load(&rows[i]));
            }
        }
        w.ballot(w.ge_i(w.or(w.or(a[0], a[1]), w.or(a[2], a[3])), w.splat_u(1)))
    }
}

struct Fma;

impl Kernel for Fma {
    type Out = f32;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> f32 {
        let x = w.splat(black_box(0.999));
        let y = w.splat(black_box(0.001));
        let mut a = [y; 8];
        for _ in 0..FMA_ROUNDS {
            for a in &mut a[..chains(W::ROWS)] {
                *a = w.fma(*a, x, y);
            }
        }
        let mut sum = a[0];
        for a in &a[1..] {
            sum = w.add(sum, *a);
        }
        w.reduce_sum(sum)
    }
}

/// Pseudo-random numbers in [-0.5, 0.5).
pub fn noise(seed: u64) -> impl Iterator<Item = f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    })
}
