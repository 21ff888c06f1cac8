//! Attention over a forest of blocks, one warp per block, and the mass of pages; [`crate::join`] joins the blocks' results.
//!
//! The 32 threads of a warp each hold a `&mut` to the warp's memory. Each writes its own lane's words, and words that
//! are the same in all lanes. Rust's rules do not cover this: `tests/ptx_bits.rs` checks it by running the PTX itself in an
//! interpreter that reports races between lanes and warps.

use crate::args::{LayoutArg, MassArg, RopeArg, SightArg, TaskArg, WeighedArg};
use crate::gpu::{Lane, afresh, afresh_at, thread};
use core::slice;
use pikv_core::LANES;
use pikv_core::attend::{Form, Looks, Sight, attend_block};
use pikv_core::full::{Full, PageRef, Query};
use pikv_core::mass::{PageSum, ROW, Rows};
use pikv_core::merge::Partial;
use pikv_core::page::Layout;
use pikv_core::rope::Rotation;
use pikv_core::warp::Warp;

/// Full pages of a block, by address. Each is loaded when its turn comes: a slice of all of them would be memory of
/// every lane's own.
struct Listed<'a, const R: usize> {
    layout: &'a Layout,
    pages: *const *const u32,
    live: *const u32,
    sights: *const SightArg,
    count: usize,
    query: Query<'a, R>,
}

/// Pages with their layout.
struct Pages<'a, const N: usize> {
    layout: Layout,
    pages: [PageRef<'a>; N],
}

impl<'a, const R: usize> Listed<'a, R> {
    /// Pages `at`, which are below `count`.
    #[inline(always)]
    fn pages<const N: usize>(&self, at: [usize; N]) -> Pages<'a, N> {
        let Layout { k_dim, v_dim, k, v, .. } = *self.layout;
        let layout = Layout::new(afresh(k_dim), k).values(afresh(v_dim), v);
        // SAFETY: the kernel's caller promised that the lists and the pages are valid.
        let pages = at.map(|i| unsafe {
            let words = slice::from_raw_parts(*self.pages.add(i), layout.words() as usize);
            PageRef { words, live: *self.live.add(i) }
        });
        Pages { layout, pages }
    }

    #[inline(always)]
    fn full<'b, const N: usize>(&'b self, Pages { layout, pages }: &'b Pages<'a, N>) -> Full<'b, R> {
        Full { layout, pages, next: [&[]; 2], query: self.query }
    }
}

impl<const R: usize> Form<Lane, R> for Listed<'_, R> {
    #[inline(always)]
    fn pages(&self) -> usize {
        self.count
    }

    #[inline(always)]
    fn acc_rows(&self) -> usize {
        self.layout.acc_rows() as usize
    }

    #[inline(always)]
    fn seen(&self, w: Lane, i: usize, _: &[Sight; R]) -> [u32; R] {
        // SAFETY: the kernel's caller promised that `sights` has the bundle's rows.
        let sight = &unsafe { sights(self.sights) };
        self.full(&self.pages([i])).seen(w, 0, sight)
    }

    const TWOS: bool = true;

    #[inline(always)]
    fn twos(&self) -> bool {
        self.query.rotation.is_none()
    }

    #[inline(always)]
    fn scores(&mut self, w: Lane, i: usize) -> [f32; R] {
        self.full(&self.pages([i])).scores(w, 0)
    }

    /// Without a page `i + 1` page `i` is read twice.
    #[inline(always)]
    fn pair(&mut self, w: Lane, i: usize) -> [[f32; R]; 2] {
        self.full(&self.pages([i, (i + 1).min(self.count - 1)])).pair(w, 0)
    }

    #[inline(always)]
    fn weigh(&mut self, w: Lane, i: usize, seen: &[u32; R], p: &[f32; R], acc: &mut [[f32; LANES]]) {
        self.full(&self.pages([i])).weigh(w, 0, seen, p, acc);
    }

    #[inline(always)]
    fn finish(&mut self, _: Lane, _: &mut [[f32; LANES]]) {}
}

/// Table of a rotation; empty without a rotation.
///
/// # Safety
/// `table` must be the table of the rotation: `[rotary_dim / 2][2][capacity]`.
#[inline(always)]
pub(crate) unsafe fn turns<'a>(of: &RopeArg, table: *const f32) -> &'a [f32] {
    let entries = of.rotary_dim as usize * of.capacity as usize;
    // SAFETY: the caller's promise.
    if entries == 0 { &[] } else { unsafe { slice::from_raw_parts(table, entries) } }
}

/// Sights of the rows of a bundle, read again for each page: four words a row.
///
/// # Safety
/// `at` must have `R` entries.
#[inline(always)]
pub(crate) unsafe fn sights<const R: usize>(at: *const SightArg) -> [Sight; R] {
    let at = afresh_at(at);
    let mut sight = [Sight::NONE; R];
    for (r, sight) in sight.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *sight = unsafe { (*at.add(r)).sight() };
    }
    sight
}

/// # Safety
/// The requirements of [`attend_r1`] and its siblings.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the parameters of the kernels that it is the body of")]
unsafe fn attend<const R: usize>(
    layout: &LayoutArg,
    q: *const f32,
    pages: *const *const u32,
    live: *const u32,
    tasks: *const TaskArg,
    count: u32,
    sights: *const SightArg,
    softcap: f32,
    rope: &RopeArg,
    table: *const f32,
    parts: *mut f32,
    raw: *mut f32,
) {
    let layout = layout.layout();
    let index = thread::warp_index();
    if index >= count {
        return;
    }
    // SAFETY: by the caller's promise on `tasks`.
    let task = unsafe { *tasks.add(index as usize) };
    let channels = layout.k_channels() as usize;
    let len = Partial::len(R, layout.acc_rows());
    // SAFETY: by the caller's promise on `q`, `table` and `parts`; a warp has a part of its own, whose words are divided among its
    // lanes.
    let (q, table, part) = unsafe {
        (
            slice::from_raw_parts(q.add(task.q as usize), channels * R),
            turns(rope, table),
            slice::from_raw_parts_mut(parts.add(task.part as usize), len),
        )
    };
    let query = Query {
        q: q.as_chunks().0,
        k_dim: layout.k_dim as usize,
        rotation: rope.rope().map(|r| Rotation { rope: r, table, capacity: rope.capacity }),
    };
    // SAFETY: whole warps are launched, and control flow depends only on the warp's task, the same in all lanes.
    let lanes = unsafe { Lane::new() };
    let mut part = Partial::new(part, R, layout.acc_rows());
    // The form has the sights of the rows.
    let looks = Looks { sight: [Sight::NONE; R], softcap: (softcap > 0.0).then_some(softcap) };
    let (first, count) = (task.pages as usize, task.count as usize);
    // SAFETY: by the caller's promise on `pages` and `live`, which have the block's pages, and `sights`, which has the bundle's rows.
    let (pages, live, at) = unsafe { (pages.add(first), live.add(first), sights.add(task.sights as usize)) };
    let mut form = Listed { layout: &layout, pages, live, sights: at, count, query };
    // SAFETY: by the caller's promise on `raw`: [`ROW`] f32 per row, of this task only.
    let mut raw =
        (!raw.is_null()).then(|| unsafe { slice::from_raw_parts_mut(raw.add(task.raw as usize), R * ROW) });
    let weights = raw.as_mut().map(|raw| raw.as_chunks_mut().0.as_chunks_mut().0);
    attend_block(lanes, &mut form, &looks, &mut part, 0, weights);
    if let Some(raw) = raw {
        raw[R * (ROW - 1)..].copy_from_slice(part.m);
    }
}

macro_rules! attend {
    ($($name:ident $rows:literal),*) => {$(
        #[doc = concat!("Attends bundles of ", $rows, " query rows over blocks of pages, a warp a task.")]
        ///
        /// `q`: bundles of `[channels][rows]`, scaled, the channels padded to whole words. `pages` and `live`: every page's
        /// address and the lanes that are read, a bit each. `sights`: bundles of `[rows]`. `softcap`: in base 2, 0 for none. `table`: of
        /// the rotation, `[rotary_dim / 2][2][capacity]`. The partial result of a task, [`Partial::len`] f32 long, goes to `parts`,
        /// and unless `raw` is null its weights, [`ROW`] f32 a row, to `raw`.
        ///
        /// # Safety
        /// The pointers must be valid for the memory described, no task may have more than 8 pages, their partial results must not overlap,
        /// and whole warps must be launched, at most [`WARPS`](crate::WARPS) a block.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            layout: LayoutArg,
            q: *const f32,
            pages: *const *const u32,
            live: *const u32,
            tasks: *const TaskArg,
            count: u32,
            sights: *const SightArg,
            softcap: f32,
            rope: RopeArg,
            table: *const f32,
            parts: *mut f32,
            raw: *mut f32,
        ) {
            // SAFETY: the caller's own promise.
            unsafe {
                attend::<$rows>(&layout, q, pages, live, tasks, count, sights, softcap, &rope, table, parts, raw);
            }
        }
    )*};
}

attend!(attend_r1 1, attend_r2 2, attend_r4 4, attend_r8 8);

/// Sums the weights of pages over rows and their tokens, one warp per page: those of `masses[i]` to row `out` of `mass`, rows of 32.
///
/// # Safety
/// The pointers must be valid for the memory described, no output may occur twice in `masses`, and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn mass_pages(
    layout: LayoutArg,
    group: u32,
    masses: *const MassArg,
    count: u32,
    weighed: *const WeighedArg,
    raw: *const f32,
    parts: *const f32,
    mass: *mut [f32; LANES],
) {
    let layout = layout.layout();
    let index = thread::warp_index();
    if index >= count {
        return;
    }
    let stride = layout.acc_rows() as usize * LANES;
    // SAFETY: by the caller's promise; whole warps are launched, and control flow depends only on the warp's page.
    unsafe {
        let lanes = Lane::new();
        let page = *masses.add(index as usize);
        let out = &mut *mass.add(page.out as usize);
        let mut sum = PageSum::new(lanes, lanes.load_f(out), page.token);
        for i in 0..page.count {
            let WeighedArg { raw: at, part, width, .. } = *weighed.add((page.first + i) as usize);
            let width = width as usize;
            let ends = slice::from_raw_parts(parts.add(part as usize + width * stride), 2 * width);
            let (m, l) = ends.split_at(width);
            let at = at as usize + page.block as usize * width * ROW;
            let rows = Rows { width, raw: slice::from_raw_parts(raw.add(at), width * ROW), m, l };
            sum.take(lanes, &rows, page.page as usize, group, page.from, page.to);
        }
        lanes.store(sum.all(), out);
    }
}
