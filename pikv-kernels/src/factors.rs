//! Attention over packed pages whose K or V is two factors, in packed form: one kernel for keys that are stored rotated and for those
//! that are rotated when read.

use crate::args::{LayoutArg, MapArg, PackedArg, RopeArg, SightArg, TaskArg};
use crate::gpu::Lane;
use crate::packed::{Given, Listed, Reader, Task, Turned, run};
use pikv_core::LANES;
use pikv_core::attend::Form;
use pikv_core::codec::factors::{FactorPages, FactorScratch};
use pikv_core::codec::packed::Packed;
use pikv_core::codec::read::{Folded, PackedRef};

/// Reads factored pages.
struct Factors<'a> {
    query: Folded<'a, 1>,
    scratch: &'a mut FactorScratch<1>,
    rebuilt: &'a mut [[f32; LANES]],
}

impl Reader<1> for Factors<'_> {
    #[inline(always)]
    fn over<'b>(&'b mut self, packed: &'b Packed, pages: &'b [PackedRef<'b>]) -> impl Form<Lane, 1> {
        let Factors { query, scratch, rebuilt } = self;
        FactorPages::new(packed, pages, &[], *query, scratch, rebuilt)
    }
}

/// Attends single query rows over blocks of factored pages, one warp per task. (Wider bundles would take more registers than a thread has.)
///
/// If `rope` rotates nothing, `q` and `start` are those of [`attend_packed_r1`](crate::packed::attend_packed_r1), `q` with
/// [`Packed::query_dim`] channels, and the arguments after `rope` are ignored; else `q`, `map`, `table` and `rebuilt` are those of
/// [`attend_rebuilt_r1`](crate::packed::attend_rebuilt_r1), and `start` is ignored. The other arguments are as there.
///
/// # Safety
/// The requirements of [`attend_packed_r1`](crate::packed::attend_packed_r1).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn attend_factors(
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
    scratch: *mut FactorScratch<1>,
    parts: *mut f32,
    raw: *mut f32,
    rope: RopeArg,
    layout: LayoutArg,
    map: MapArg,
    table: *const f32,
    rebuilt: *mut [f32; LANES],
) {
    let factored = packed.factored();
    let given =
        Given { packed, q, pages, live, last, by, tasks, count, sights, softcap, scratch, parts, raw };
    let turned = Turned { layout, map, rope, table, rebuilt };
    // SAFETY: the caller's own promise.
    let Some(task) = (unsafe { given.task::<1>(&factored) }) else { return };
    // SAFETY: the caller's own promise.
    let (query, rebuilt) = unsafe {
        match turned.rope.rotary_dim {
            0 => (task.folded(&factored, q, start), &mut [][..]),
            _ => task.whole(turned, q),
        }
    };
    let Task { lanes, list, looks, scratch, part, raw, .. } = task;
    run(lanes, &mut Listed { list, reader: Factors { query, scratch, rebuilt } }, &looks, part, raw);
}
