//! Experts of tokens, and the averages of routers: one warp per row of logits, then one per 32 experts.
//!
//! Several warps count in the same words, by atomic additions of integers, so their order does not matter. All other outputs of a row
//! belong to its warp.

use crate::args::{LearnArg, RouteArg};
use crate::gpu::{Lane, thread};
use crate::rows::note;
use core::slice;
use core::sync::atomic::{AtomicU64, Ordering};
use pikv_core::rows::beyond;
use pikv_core::score::{self, Bias, Coefficients, Groups, Ranking, penalties};
use pikv_core::{LANES, Warp, hash};

/// `len` elements at an address; none at 0.
///
/// # Safety
/// There must be as many elements, and no thread may write them while they are read.
#[inline(always)]
unsafe fn list<'a, T>(at: u64, len: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    if at == 0 { &[] } else { unsafe { slice::from_raw_parts(at as *const T, len) } }
}

/// [`list`], to be written.
///
/// # Safety
/// There must be as many elements, and they must belong to the warp.
#[inline(always)]
unsafe fn list_mut<'a, T>(at: u64, len: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    if at == 0 { &mut [] } else { unsafe { slice::from_raw_parts_mut(at as *mut T, len) } }
}

impl RouteArg {
    /// # Safety
    /// The requirements of [`route_r1`].
    #[inline(always)]
    unsafe fn ranking<'a>(&self) -> Ranking<'a> {
        // SAFETY: the caller's promise.
        let fixed = unsafe { list(self.fixed, score::rows(self.experts as usize)) };
        let cap = (self.cap > 0.0).then_some(self.cap);
        let groups = Groups { count: self.groups, kept: self.kept, best: self.best };
        Ranking {
            bias: (self.fixed != 0).then_some(Bias { fixed, cap }),
            groups: (self.groups != 0).then_some(groups),
        }
    }
}

/// # Safety
/// The requirements of [`route_r1`].
#[inline(always)]
unsafe fn route<const R: usize>(of: &RouteArg) {
    let index = thread::warp_index();
    let own = index < of.rows;
    let row = if own { index } else { index - of.rows };
    if row >= of.rows || (!own && of.model == 0) {
        return;
    }
    let (experts, top_k) = (of.experts as usize, of.top_k as usize);
    let (first, first_choice) = (u64::from(row) * experts as u64, u64::from(row) * top_k as u64);
    // SAFETY: by the caller's promise; whole warps are launched, and control flow depends only on the warp's row.
    unsafe {
        let w = Lane::new();
        let logits: &[f32] = list(of.logits + 4 * first, experts);
        let (chosen, weights) = if own { (of.chosen, of.weights) } else { (of.model, of.model_weights) };
        let chosen: &mut [u32] = list_mut(chosen + 4 * first_choice, top_k);
        let weights: &mut [f32] = list_mut(weights + 4 * first_choice, top_k);
        if own && of.start != RouteArg::RANKED {
            let position = *(of.positions as *const u32).add(row as usize);
            let start = match of.start {
                RouteArg::HASHED => hash::mix(position.into()),
                _ => position.into(),
            };
            for (j, expert) in (0..).zip(chosen.iter_mut()) {
                *expert = hash::expert(start, j, of.stride, of.experts).into();
            }
            w.sync();
            score::weights(w, &score::load::<_, R>(w, logits), chosen, weights);
        } else {
            let ranking = if own { of.ranking() } else { Ranking::default() };
            score::route::<_, R>(w, logits, &ranking, chosen, weights);
        }
        if own {
            learn_row::<R>(w, of, row, logits, chosen);
        }
    }
}

/// Records of a row: a logit that is not finite, its choices, and the gate's entropy about each expert.
///
/// # Safety
/// The requirements of [`route_r1`].
#[inline(always)]
unsafe fn learn_row<const R: usize>(w: Lane, of: &RouteArg, row: u32, logits: &[f32], chosen: &[u32]) {
    // SAFETY: by the caller's promise.
    unsafe {
        if let Some((expert, value)) = beyond(w, logits, f32::MAX) {
            note(of.fault as *mut u64, row * of.experts + expert, value);
        }
        if of.counts != 0 {
            for choice in (w.lane_id() as usize..chosen.len()).step_by(LANES) {
                let count = (of.counts as *mut u64).add(chosen[choice] as usize);
                AtomicU64::from_ptr(count).fetch_add(1, Ordering::Relaxed);
            }
        }
        if of.entropies != 0 {
            let all = u64::from(row) * logits.len() as u64;
            let out: &mut [f32] = list_mut(of.entropies + 4 * all, logits.len());
            let s = score::softmax(w, &score::load::<_, R>(w, logits), &score::span::<R>(0, logits.len()));
            for (r, out) in out.chunks_mut(LANES).enumerate() {
                w.store_part(score::gate_entropy(w, &s, r), out);
            }
        }
    }
}

macro_rules! entries {
    ($($name:ident $rows:literal $experts:literal),*) => { $(
        #[doc = concat!("Chooses the experts of rows of up to ", $experts, " logits: a warp a row, and where the model's choice is another")]
        /// one, as many more for it. Counts the choices, and notes the first logit that is not finite.
        ///
        /// # Safety
        /// The addresses must be valid for what [`RouteArg`] describes, results of rows must not overlap, and whole warps must be launched.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(of: RouteArg) {
            // SAFETY: the caller's own promise.
            unsafe { route::<$rows>(&of) }
        }
    )* };
}
entries!(route_r1 1 "32", route_r8 8 "256", route_r32 32 "1024");

/// Updates the averages at `from`, `[experts]`, with the gate's entropies of `rows` rows, `[rows][experts]`, first to last, and writes
/// them to `to`: one warp per 32 experts.
///
/// # Safety
/// The pointers must be valid for the memory described, `to` may be `from`, and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn fold_entropies(
    entropies: *const f32,
    rows: u32,
    experts: u32,
    keep: f32,
    from: *const f32,
    to: *mut f32,
) {
    let first = thread::warp_index() as usize * LANES;
    let experts = experts as usize;
    if first >= experts {
        return;
    }
    let count = if experts - first < LANES { experts - first } else { LANES };
    // SAFETY: the caller's own promise; whole warps are launched, and control flow depends only on the warp's experts.
    unsafe {
        let w = Lane::new();
        let [mut h] = score::load::<_, 1>(w, slice::from_raw_parts(from.add(first), count));
        for row in 0..rows as usize {
            let row = slice::from_raw_parts(entropies.add(row * experts + first), count);
            let [x] = score::load::<_, 1>(w, row);
            h = score::fold(w, keep, h, x);
        }
        w.store_part(h, slice::from_raw_parts_mut(to.add(first), count));
    }
}

/// Updates a router's averages with the choices and misses of a step, and recomputes the bias of the logits: one warp.
///
/// # Safety
/// The addresses must be valid for what [`LearnArg`] describes, and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn learn_router(of: LearnArg) {
    if thread::warp_index() > 0 {
        return;
    }
    let experts = of.experts as usize;
    // SAFETY: the caller's own promise; whole warps are launched, and control flow depends only on values that are the same in all lanes.
    unsafe {
        let w = Lane::new();
        let counts: &mut [u64] = list_mut(of.counts, experts);
        let (load, miss): (&mut [f32], &mut [f32]) = (list_mut(of.load, experts), list_mut(of.miss, experts));
        let (wanted, missed): (&[u32], &[u32]) = (list(of.wanted, experts), list(of.missed, experts));
        let (entropy, next): (&mut [f32], &[f32]) = (list_mut(of.entropy, experts), list(of.next, experts));
        let mut total = 0;
        for n in &*counts {
            total += *n;
        }
        w.sync();
        for first in (0..experts).step_by(LANES) {
            let e = first + w.lane_id() as usize;
            if e < experts {
                if total > 0 && !load.is_empty() {
                    load[e] = score::learn_load(of.keep_load, load[e], counts[e], total, of.experts);
                    counts[e] = 0;
                }
                if !miss.is_empty() {
                    miss[e] = match of.count_misses {
                        0 => score::learn_rate(of.keep_miss, miss[e], wanted[e], missed[e]),
                        _ => score::learn_count(of.keep_miss, miss[e], missed[e], of.of_page),
                    };
                }
                if !entropy.is_empty() {
                    entropy[e] = next[e];
                }
            }
        }
        w.sync();
        let c = Coefficients::new(of.alpha, of.lambda, of.beta);
        penalties(w, c, experts, load, miss, entropy, list_mut(of.fixed, score::rows(experts)));
    }
}
