//! Attention over packed pages whose K or V is two factors, as they lie: one kernel for keys that come rotated and for those that are turned
//! as they are read.

use crate::args::{LayoutArg, MapArg, PackedArg, RopeArg, SightArg, TaskArg};
use crate::packed::{Given, Task, Turned, run};
use pikv_core::LANES;
use pikv_core::codec::factors::{FactorPages, FactorScratch};

/// # Safety
/// As [`attend_factors_r1`] and its siblings.
#[inline(always)]
unsafe fn attend<const R: usize>(given: Given<FactorScratch<R>>, start: *const f32, turned: Turned) {
    let (packed, q) = (given.packed.factored(), given.q);
    // SAFETY: the caller's own promise.
    let Some(task) = (unsafe { given.task::<R>(&packed) }) else { return };
    // SAFETY: the caller's own promise.
    let (folded, rebuilt) = unsafe {
        match turned.rope.rotary_dim {
            0 => (task.folded(&packed, q, start), &mut [][..]),
            _ => task.whole(turned, q),
        }
    };
    let Task { lanes, list, count, looks, scratch, part, raw, .. } = task;
    let mut form = FactorPages::new(lanes, &packed, &list[..count], &[], folded, scratch, rebuilt);
    run(lanes, &mut form, &looks, part, raw);
}

macro_rules! attend {
    ($($name:ident $rows:literal),*) => {$(
        #[doc = concat!("Attends bundles of ", $rows, " query rows over blocks of factored pages, a warp a task.")]
        ///
        /// Where `rope` turns nothing, `q` and `start` are those of [`attend_packed_r1`](crate::packed::attend_packed_r1), `q` of as many
        /// channels as [`Packed::query_dim`](pikv_core::codec::packed::Packed::query_dim) says, and what follows `rope` does not count;
        /// else `q`, `map`, `table` and `rebuilt` are those of [`attend_rebuilt_r1`](crate::packed::attend_rebuilt_r1), and `start` does
        /// not. The rest is as there.
        ///
        /// # Safety
        /// As [`attend_packed_r1`](crate::packed::attend_packed_r1).
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
            scratch: *mut FactorScratch<$rows>,
            parts: *mut f32,
            raw: *mut f32,
            rope: RopeArg,
            layout: LayoutArg,
            map: MapArg,
            table: *const f32,
            rebuilt: *mut [f32; LANES],
        ) {
            let given =
                Given { packed, q, pages, live, last, by, tasks, count, sights, softcap, scratch, parts, raw };
            let turned = Turned { layout, map, rope, table, rebuilt };
            // SAFETY: the caller's own promise.
            unsafe { attend(given, start, turned) }
        }
    )*};
}

attend!(attend_factors_r1 1, attend_factors_r2 2, attend_factors_r4 4);
