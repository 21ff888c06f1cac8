//! One call of attention: what it reads, and how its rows are numbered.

use crate::attend::forest::Forest;
use crate::attend::reduce::Trees;
use crate::attend::view::View;
use crate::base::device_slice::DeviceSlice;
use crate::base::host_slice::HostSlice;
use crate::base::locks::Mutex;
use crate::base::rope_tables::Table;
use crate::codec::HeadCodec;
use crate::config::shape::CacheShape;
use pikv_core::page::Layout;
use pikv_core::plan::LayerShape;
use pikv_core::rope::Rotation;
use pikv_core::rows::TOP_SCORE;
use pikv_core::warp::LANES;
use pikv_lanes::Lanes;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

/// Query rows of one head that a task takes at most: enough to read a block from the cache many times, few enough for
/// their partial results to stay there.
pub const TILE: usize = 64;

/// Some rows of one forest.
#[derive(Clone, Copy)]
pub struct Item<'a> {
    pub forest: &'a Forest<'a>,
    /// First row of the KV head, `position offset * group + query head in the group`.
    pub row: usize,
    pub rows: usize,
}

/// Queries of a job that lie on a device.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
pub(crate) struct OnDevice {
    /// `[rows][query_heads][k_dim]`
    pub q: DeviceSlice,
    /// Where one that is not finite is noted.
    pub fault: u64,
}

/// Partial results of blocks that were worked out elsewhere.
pub(crate) trait Elsewhere: Send + Sync {
    /// The partial result of a block, and the weights behind it, if it was worked out.
    fn place(
        &self,
        item: &Item<'_>,
        block: usize,
        part: &mut [f32],
        raw: Option<&mut [[f32; LANES]]>,
    ) -> bool;
}

/// Rows of a bundle at most, by the lanes of the cache and the codecs that packed what is read.
pub type Widest = fn(Lanes, [Option<&HeadCodec>; 2]) -> usize;

/// Everything that a task reads.
pub struct Job<'a> {
    pub widest: Widest,
    pub inner: &'a CacheShape,
    pub layer: usize,
    pub shape: &'a LayerShape,
    pub views: &'a [View<'a>],
    /// `[rows][query_heads][k_dim]`, if the host has them.
    pub q: HostSlice<'a>,
    /// The queries, if a device has them.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    pub on_device: Option<OnDevice>,
    /// As asked for, to be named by errors.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    pub scale: f32,
    /// Blocks of a task, if that is asked for.
    pub split: Option<u32>,
    /// Factor of q, in base 2 unless there is a cap.
    pub factor: f32,
    pub softcap: Option<f32>,
    pub table: Option<Arc<Table>>,
    /// By how much products of turned channels are larger than those before the rotation; 1 but where frequencies are scaled.
    pub stretch: f32,
    /// What other ranks worked out.
    pub remote: Option<Arc<dyn Elsewhere>>,
    pub overflow: AtomicUsize,
    /// The first element of the output that its dtype does not hold, and the value.
    pub beyond: Mutex<Option<(usize, f32)>>,
}

impl<'a> Job<'a> {
    pub fn group(&self) -> usize {
        self.shape.group() as usize
    }

    pub fn layout(&self) -> &Layout {
        &self.shape.layout
    }

    /// The rows of a forest, `step` at a time.
    pub fn items<'f>(&self, forest: &'f Forest<'f>, step: usize) -> impl Iterator<Item = Item<'f>> + use<'f> {
        let rows = self.views[forest.view].rows as usize * self.group();
        (0..rows).step_by(step).map(move |row| Item { forest, row, rows: step.min(rows - row) })
    }

    /// Rows of an item that holds whole tokens.
    pub fn whole(&self) -> usize {
        (TILE / self.group()).max(1) * self.group()
    }

    /// Whether the rows of an item see sinks across what was evicted.
    pub fn closed_gaps(&self, item: &Item<'_>) -> bool {
        self.views[item.forest.view].closed_gaps
    }

    pub fn codec(&self, forest: &Forest<'_>) -> Option<&'a HeadCodec> {
        self.views[forest.view].layer.codecs[forest.head].as_ref()
    }

    /// Those that have packed pages, in turn.
    pub fn codecs(&self, forest: &Forest<'_>) -> [Option<&'a HeadCodec>; 2] {
        let first = self.codec(forest);
        let second = first.and_then(|codec| Some(&codec.aged.as_ref()?.codec));
        [first.filter(|_| forest.packed[0] > 0), second.filter(|_| forest.packed[1] > 0)]
    }

    /// Rows of a bundle at most.
    pub fn most(&self, forest: &Forest<'_>) -> usize {
        (self.widest)(self.inner.config.lanes, self.codecs(forest))
    }

    pub fn trees(&self, item: &Item<'_>) -> Trees<'_> {
        Trees::new(self.inner.config.lanes, self.layout(), self.codecs(item.forest), item.rows)
    }

    pub fn rotation(&self) -> Option<Rotation<'_>> {
        Some(self.table.as_ref()?.rotation(self.shape.rope?))
    }

    /// Index of (row, query head) in the call.
    pub fn row_of(&self, view: usize, row: usize, head: usize) -> usize {
        (self.views[view].start + row) * self.shape.query_heads as usize + head
    }

    /// The rows of the call that are attended, those next to each other as one range: rows of sequences that were left out are none.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    pub fn attended(&self) -> SmallVec<[Range<usize>; 2]> {
        let mut all: SmallVec<[Range<usize>; 2]> = SmallVec::new();
        for view in self.views.iter().filter(|view| view.rows > 0) {
            let rows = view.start..view.start + view.rows as usize;
            match all.last_mut() {
                Some(last) if last.end == rows.start => last.end = rows.end,
                _ => all.push(rows),
            }
        }
        all
    }

    /// Where row `r` of an item goes.
    pub fn output_row(&self, item: &Item<'_>, r: usize) -> usize {
        let (group, i) = (self.group(), item.row + r);
        self.row_of(item.forest.view, i / group, item.forest.head * group + i % group)
    }

    /// Whether exponent, sum and output of row `at` of the call are those of scores that f32 holds.
    pub fn judge(&self, at: usize, m: f32, l: f32, out: &[f32]) {
        let empty = m == f32::NEG_INFINITY;
        let sound = m.abs() < TOP_SCORE && l.is_finite() && out.iter().all(|x| x.is_finite());
        if !empty && !sound {
            self.overflow.fetch_min(at, Ordering::Relaxed);
        }
    }

    /// Notes an element of the output that its dtype does not hold, if it is the first.
    pub fn note_beyond(&self, found: Option<(usize, f32)>) {
        let Some((at, value)) = found else { return };
        let mut beyond = self.beyond.lock().unwrap_or_else(PoisonError::into_inner);
        if beyond.is_none_or(|(first, _)| at < first) {
            *beyond = Some((at, value));
        }
    }

    /// What was noted.
    pub fn found_beyond(&self) -> Option<(usize, f32)> {
        *self.beyond.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
