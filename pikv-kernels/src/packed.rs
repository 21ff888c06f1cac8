//! Attention over packed pages in packed form: [`crate::attend`] for pages that a codec wrote; [`crate::factors`] is for pages that it
//! wrote as factors.

use crate::args::{LayoutArg, MapArg, PackedArg, RopeArg, SightArg, TaskArg};
use crate::attend::{sights, turns};
use crate::gpu::{Lane, afresh, thread};
use core::slice;
use pikv_core::LANES;
use pikv_core::attend::{Form, Looks, Sight, attend_block};
use pikv_core::codec::back::Stored;
use pikv_core::codec::packed::{Packed, Side};
use pikv_core::codec::read::{Back, Folded, Only, PackedPages, PackedRef, REBUILT, Scratch, seen};
use pikv_core::full::Query;
use pikv_core::mass::ROW;
use pikv_core::merge::Partial;
use pikv_core::rope::Rotation;

/// Arguments of all kernels that attend over packed pages; `S` is the working memory of a warp.
pub(crate) struct Given<S> {
    pub packed: PackedArg,
    pub q: *const f32,
    pub pages: *const *const u32,
    pub live: *const u32,
    pub last: *const u32,
    pub by: *const u32,
    pub tasks: *const TaskArg,
    pub count: u32,
    pub sights: *const SightArg,
    pub softcap: f32,
    pub scratch: *mut S,
    pub parts: *mut f32,
    pub raw: *mut f32,
}

/// Further arguments of kernels for keys that are stored unrotated.
#[derive(Clone, Copy)]
pub(crate) struct Turned {
    pub layout: LayoutArg,
    pub map: MapArg,
    pub rope: RopeArg,
    pub table: *const f32,
    pub rebuilt: *mut [f32; LANES],
}

/// Packed pages of a block, by address. Each is loaded when its turn comes: a slice of all of them would be memory
/// of every lane's own.
pub(crate) struct List<'a> {
    packed: &'a Packed,
    pages: *const *const u32,
    live: *const u32,
    last: *const u32,
    by: *const u32,
    sights: *const SightArg,
    count: usize,
}

impl<'a> List<'a> {
    /// Layout of the pages.
    #[inline(always)]
    fn packed(&self) -> Packed {
        let mut packed = *self.packed;
        (packed.k_dim, packed.v_dim) = (afresh(packed.k_dim), afresh(packed.v_dim));
        (packed.k_side, packed.v_side) = (side(packed.k_side), side(packed.v_side));
        packed
    }

    /// Page `i`, which is below `count`.
    #[inline(always)]
    fn page(&self, i: usize) -> [PackedRef<'a>; 1] {
        // SAFETY: the kernel's caller promised that the lists and the pages are valid.
        unsafe {
            let words = slice::from_raw_parts(*self.pages.add(i), self.packed.words() as usize);
            [PackedRef { words, live: *self.live.add(i), last: *self.last.add(i), by: *self.by.add(i) }]
        }
    }
}

/// The same side, passed through [`afresh`].
#[inline(always)]
fn side(side: Side) -> Side {
    match side {
        Side::Means { level } => Side::Means { level: afresh(level) },
        Side::Basis { wide } => Side::Basis { wide: afresh(wide) },
        side => side,
    }
}

/// Reads packed pages of one form.
pub(crate) trait Reader<const R: usize> {
    /// The form over these pages. Its working memory is kept.
    fn over<'b>(&'b mut self, packed: &'b Packed, pages: &'b [PackedRef<'b>]) -> impl Form<Lane, R>;
}

/// The pages of a list, read one by one.
pub(crate) struct Listed<'a, F> {
    pub list: List<'a>,
    pub reader: F,
}

impl<F: Reader<R>, const R: usize> Form<Lane, R> for Listed<'_, F> {
    #[inline(always)]
    fn pages(&self) -> usize {
        self.list.count
    }

    #[inline(always)]
    fn acc_rows(&self) -> usize {
        self.list.packed.acc_rows() as usize
    }

    #[inline(always)]
    fn begin(&mut self, w: Lane) {
        self.reader.over(&self.list.packed(), &[]).begin(w);
    }

    #[inline(always)]
    fn seen(&self, w: Lane, i: usize, _: &[Sight; R]) -> [u32; R] {
        // SAFETY: the kernel's caller promised that `sights` has the bundle's rows.
        seen(w, &self.list.page(i)[0], &unsafe { sights(self.list.sights) })
    }

    #[inline(always)]
    fn scores(&mut self, w: Lane, i: usize) -> [f32; R] {
        self.reader.over(&self.list.packed(), &self.list.page(i)).scores(w, 0)
    }

    #[inline(always)]
    fn weigh(&mut self, w: Lane, i: usize, seen: &[u32; R], p: &[f32; R], acc: &mut [[f32; LANES]]) {
        self.reader.over(&self.list.packed(), &self.list.page(i)).weigh(w, 0, seen, p, acc);
    }

    #[inline(always)]
    fn finish(&mut self, w: Lane, acc: &mut [[f32; LANES]]) {
        self.reader.over(&self.list.packed(), &[]).finish(w, acc);
    }
}

/// A warp's task.
pub(crate) struct Task<'a, S, const R: usize> {
    pub index: usize,
    pub lanes: Lane,
    /// First word of the queries.
    q: usize,
    pub list: List<'a>,
    pub looks: Looks<R>,
    pub scratch: &'a mut S,
    pub part: &'a mut [f32],
    pub raw: Option<&'a mut [f32]>,
}

impl<S> Given<S> {
    /// The warp's task, over pages of this layout; none for warps past the last task.
    ///
    /// # Safety
    /// The requirements of [`attend_packed_r1`].
    #[inline(always)]
    pub unsafe fn task<'a, const R: usize>(self, packed: &'a Packed) -> Option<Task<'a, S, R>> {
        let Given { pages, live, last, by, tasks, count, sights, softcap, scratch, parts, raw, .. } = self;
        let index = thread::warp_index();
        if index >= count {
            return None;
        }
        // SAFETY: by the caller's promise on `tasks`.
        let task = unsafe { *tasks.add(index as usize) };
        let len = Partial::len(R, packed.acc_rows());
        let (first, count) = (task.pages as usize, task.count as usize);
        // SAFETY: by the caller's promise on the lists, which all have the block's pages, and on `scratch`, `parts` and `raw`, each with
        // [`ROW`] f32 per row: a warp has its own, whose words are divided among its lanes. Whole warps are launched, and control flow
        // depends only on the warp's task.
        unsafe {
            let list = List {
                packed,
                pages: pages.add(first),
                live: live.add(first),
                last: last.add(first),
                by: by.add(first),
                sights: sights.add(task.sights as usize),
                count,
            };
            let raw =
                (!raw.is_null()).then(|| slice::from_raw_parts_mut(raw.add(task.raw as usize), R * ROW));
            Some(Task {
                index: index as usize,
                lanes: Lane::new(),
                q: task.q as usize,
                list,
                // The list has the sights of the rows.
                looks: Looks { sight: [Sight::NONE; R], softcap: (softcap > 0.0).then_some(softcap) },
                scratch: &mut *scratch.add(index as usize),
                part: slice::from_raw_parts_mut(parts.add(task.part as usize), len),
                raw,
            })
        }
    }
}

impl<'a, S, const R: usize> Task<'a, S, R> {
    /// The task's queries as folded by the codec, and the start of their scores.
    ///
    /// # Safety
    /// The requirements of [`attend_packed_r1`].
    #[inline(always)]
    pub unsafe fn folded(&self, packed: &Packed, q: *const f32, start: *const f32) -> Folded<'a, R> {
        let rows = R * packed.query_cols() as usize;
        let bundle = self.q / (rows * LANES);
        let mut starts = [0.0; R];
        for (r, to) in starts.iter_mut().enumerate() {
            // SAFETY: by the caller's promise on `start`.
            *to = unsafe { *start.add(bundle * R + r) };
        }
        // SAFETY: by the caller's promise on `q`.
        let q = unsafe { slice::from_raw_parts(q.add(self.q).cast::<[f32; LANES]>(), rows) };
        Folded { rows: q, start: starts, whole: None }
    }

    /// The task's whole queries, for keys that are rotated when read, and memory to rebuild those keys.
    ///
    /// # Safety
    /// The requirements of [`attend_rebuilt_r1`].
    #[inline(always)]
    pub unsafe fn whole(&self, turned: Turned, q: *const f32) -> (Folded<'a, R>, &'a mut [[f32; LANES]]) {
        let Turned { layout, map, rope, table, rebuilt } = turned;
        let layout = layout.layout();
        let channels = layout.k_channels() as usize;
        // SAFETY: by the caller's promise on `q`, `map`, `table` and `rebuilt`; the last is this warp's own.
        let (q, back, table, rebuilt) = unsafe {
            (
                slice::from_raw_parts(q.add(self.q), channels * R),
                map.back(),
                turns(&rope, table),
                slice::from_raw_parts_mut(rebuilt.add(self.index * REBUILT), REBUILT),
            )
        };
        let query = Query {
            q: q.as_chunks().0,
            k_dim: layout.k_dim as usize,
            rotation: rope.rope().map(|r| Rotation { rope: r, table, capacity: rope.capacity }),
        };
        (Folded { rows: &[], start: [0.0; R], whole: Some((back, query)) }, rebuilt)
    }
}

impl MapArg {
    /// # Safety
    /// The addresses must be those of slices with the lengths that the widths give.
    #[inline(always)]
    pub(crate) unsafe fn back<'a>(&self) -> Option<Back<'a>> {
        let (wide, narrow) = (self.wide as usize, self.narrow as usize);
        // SAFETY: the caller's promise.
        unsafe {
            match self.form {
                0 => None,
                MapArg::HADAMARD => Some(Back::Hadamard { block: self.block as usize }),
                MapArg::SELECT => {
                    Some(Back::Select { channels: slice::from_raw_parts(self.table as *const u32, narrow) })
                }
                _ => Some(Back::Dense {
                    decode: slice::from_raw_parts(self.table as *const f32, wide * narrow),
                    bias: self.bias(),
                }),
            }
        }
    }

    /// # Safety
    /// The requirements of [`MapArg::back`].
    #[inline(always)]
    pub(crate) unsafe fn stored<'a>(&self) -> Stored<'a> {
        let (wide, narrow) = (self.wide as usize, self.narrow as usize);
        // SAFETY: the caller's promise.
        unsafe {
            match self.form {
                0 => Stored::Same,
                MapArg::HADAMARD => Stored::Hadamard { block: self.block as usize },
                MapArg::SELECT => {
                    Stored::Select { channels: slice::from_raw_parts(self.table as *const u32, narrow) }
                }
                _ => Stored::Dense {
                    decode_t: slice::from_raw_parts(self.table as *const f32, wide * narrow),
                    bias: self.bias(),
                },
            }
        }
    }

    /// # Safety
    /// The requirements of [`MapArg::back`].
    #[inline(always)]
    pub(crate) unsafe fn bias<'a>(&self) -> &'a [f32] {
        // SAFETY: the caller's promise.
        let whole = || unsafe { slice::from_raw_parts(self.bias as *const f32, self.wide as usize) };
        if self.bias == 0 { &[] } else { whole() }
    }
}

/// # Safety
/// The requirements of [`attend_packed_r1`] and its siblings; `start` is read only if `turned` is `None`.
#[inline(always)]
unsafe fn attend<const R: usize>(given: Given<Scratch<R>>, start: *const f32, turned: Option<Turned>) {
    let (packed, q) = (given.packed.packed(), given.q);
    // SAFETY: the caller's own promise.
    let Some(task) = (unsafe { given.task::<R>(&packed) }) else { return };
    match turned {
        None => {
            // SAFETY: the caller's own promise.
            let query = unsafe { task.folded(&packed, q, start) };
            let Task { lanes, list, looks, scratch, part, raw, .. } = task;
            let reader = Pages::<R, false> { query, scratch, rebuilt: &mut [] };
            run(lanes, &mut Listed { list, reader }, &looks, part, raw);
        }
        Some(turned) => {
            // SAFETY: the caller's own promise.
            let (query, rebuilt) = unsafe { task.whole(turned, q) };
            let Task { lanes, list, looks, scratch, part, raw, .. } = task;
            let reader = Pages::<R, true> { query, scratch, rebuilt };
            run(lanes, &mut Listed { list, reader }, &looks, part, raw);
        }
    }
}

/// Reads packed pages; if `WHOLE`, keys are rotated when read.
struct Pages<'a, const R: usize, const WHOLE: bool> {
    query: Folded<'a, R>,
    scratch: &'a mut Scratch<R>,
    rebuilt: &'a mut [[f32; LANES]],
}

impl<const R: usize, const WHOLE: bool> Reader<R> for Pages<'_, R, WHOLE> {
    #[inline(always)]
    fn over<'b>(&'b mut self, packed: &'b Packed, pages: &'b [PackedRef<'b>]) -> impl Form<Lane, R> {
        let Pages { query, scratch, rebuilt } = self;
        Only::<R, WHOLE>(PackedPages::new(packed, pages, &[], *query, scratch, rebuilt))
    }
}

/// Attends, and writes the exponents after the weights, if these are kept.
#[inline(always)]
pub(crate) fn run<P: Form<Lane, R>, const R: usize>(
    lanes: Lane,
    form: &mut P,
    looks: &Looks<R>,
    part: &mut [f32],
    mut raw: Option<&mut [f32]>,
) {
    let mut part = Partial::new(part, R, form.acc_rows() as u32);
    let weights = raw.as_mut().map(|raw| raw.as_chunks_mut().0.as_chunks_mut().0);
    attend_block(lanes, form, looks, &mut part, 0, weights);
    if let Some(raw) = raw {
        raw[R * (ROW - 1)..].copy_from_slice(part.m);
    }
}

macro_rules! attend {
    ($($name:ident $turned:ident $rows:literal),*) => {$(
        #[doc = concat!("Attends bundles of ", $rows, " query rows over blocks of packed pages, a warp a task.")]
        ///
        /// `q`: bundles of `[rows][k_cols][32]`, as in [`Folded`]. `start`: start of their scores, bundles of
        /// `[rows]`. `pages`, `live`, `last` and `by`: address and other fields of each [`PackedRef`]. `sights`: bundles of
        /// `[rows]`. `softcap`: in base 2, 0 for none. `scratch`: one for each warp, 128-byte aligned, of any content. The partial
        /// result of a task, [`Partial::len`] f32 long, is written to `parts`, and unless `raw` is null its weights, [`ROW`] f32 a row,
        /// to `raw`.
        ///
        /// # Safety
        /// The pointers must be valid for the memory described, no task may have more than 8 pages, their partial results must not overlap,
        /// and whole warps must be launched, at most [`WARPS`](crate::WARPS) a block.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            packed: PackedArg,
            q: *const f32,
            start: *const f32,
            pages: *const *const u32,
            live: *const u32,
            last: *const u32,
            by: *const u32,
            tasks: *const TaskArg,
            count: u32,
            sights: *const SightArg,
            softcap: f32,
            scratch: *mut Scratch<$rows>,
            parts: *mut f32,
            raw: *mut f32,
        ) {
            let given =
                Given { packed, q, pages, live, last, by, tasks, count, sights, softcap, scratch, parts, raw };
            // SAFETY: the caller's own promise.
            unsafe { attend(given, start, None) }
        }

        #[doc = concat!("Attends bundles of ", $rows, " query rows over blocks of packed pages whose keys are turned as they are")]
        /// read, a warp a task.
        ///
        /// `q`: bundles of `[channels][rows]`, scaled and rotated, the channels padded to whole words of `layout`. `map`: that of the
        /// keys. `table`: of the rotation. `rebuilt`: [`REBUILT`] rows for each warp, of any content. Otherwise as
        #[doc = concat!("[`", stringify!($name), "`].")]
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($name), "`].")]
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $turned(
            packed: PackedArg,
            layout: LayoutArg,
            map: MapArg,
            q: *const f32,
            rope: RopeArg,
            table: *const f32,
            pages: *const *const u32,
            live: *const u32,
            last: *const u32,
            by: *const u32,
            tasks: *const TaskArg,
            count: u32,
            sights: *const SightArg,
            softcap: f32,
            scratch: *mut Scratch<$rows>,
            rebuilt: *mut [f32; LANES],
            parts: *mut f32,
            raw: *mut f32,
        ) {
            let given =
                Given { packed, q, pages, live, last, by, tasks, count, sights, softcap, scratch, parts, raw };
            let turned = Turned { layout, map, rope, table, rebuilt };
            // SAFETY: the caller's own promise.
            unsafe { attend(given, core::ptr::null(), Some(turned)) }
        }
    )*};
}

attend!(
    attend_packed_r1 attend_rebuilt_r1 1,
    attend_packed_r2 attend_rebuilt_r2 2,
    attend_packed_r4 attend_rebuilt_r4 4
);
