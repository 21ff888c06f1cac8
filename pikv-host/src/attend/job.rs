//! One call of attention: the data that tasks read, and the numbering of rows.

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

/// Most query rows of one head in a task: enough to read a cached block many times, few enough for their partial results to stay in
/// the CPU's cache.
pub const TILE: usize = 64;

/// A range of rows of one forest.
#[derive(Clone, Copy)]
pub struct Item<'a> {
    pub forest: &'a Forest<'a>,
    /// First row of the KV head, `position offset * group + query head in the group`.
    pub row: usize,
    pub rows: usize,
}

/// Queries of a job on a device.
#[derive(Clone, Copy)]
pub(crate) struct DeviceQueries {
    /// `[rows][query_heads][k_dim]`
    pub q: DeviceSlice,
    /// Address of the word that records a query that is not finite.
    pub fault: u64,
}

/// Partial results of blocks that other ranks computed.
pub(crate) trait Elsewhere: Send + Sync {
    /// Writes the partial result of a block, and its weights, if another rank computed it; returns whether it did.
    fn place(
        &self,
        item: &Item<'_>,
        block: usize,
        part: &mut [f32],
        raw: Option<&mut [[f32; LANES]]>,
    ) -> bool;
}

/// Most rows of a bundle, by the lanes of the cache and the codecs of the pages that are read.
pub type Widest = fn(Lanes, [Option<&HeadCodec>; 2]) -> usize;

/// Data that all tasks of a call read.
pub struct Job<'a> {
    pub widest: Widest,
    pub inner: &'a CacheShape,
    pub layer: usize,
    pub shape: &'a LayerShape,
    pub views: &'a [View<'a>],
    /// `[rows][query_heads][k_dim]`, if the queries are on the host.
    pub q: HostSlice<'a>,
    /// The queries, if they are on a device.
    pub on_device: Option<DeviceQueries>,
    /// Scale from the options, for errors.
    pub scale: f32,
    /// Blocks of a task, if the options set it.
    pub split: Option<u32>,
    /// Factor of q: gives logits to base 2, or in units of the softcap.
    pub factor: f32,
    pub softcap: Option<f32>,
    /// Whether tiles of rows may be rounded to bf16.
    pub fast: bool,
    pub table: Option<Arc<Table>>,
    /// Factor by which scaled RoPE enlarges products of rotated channels; 1 without scaling.
    pub stretch: f32,
    /// Partial results of other ranks.
    pub remote: Option<Arc<dyn Elsewhere>>,
    pub overflow: AtomicUsize,
    /// Index and value of the first output that does not fit its dtype.
    pub beyond: Mutex<Option<(usize, f32)>>,
}

impl<'a> Job<'a> {
    pub fn group(&self) -> usize {
        self.shape.group() as usize
    }

    pub fn layout(&self) -> &Layout {
        &self.shape.layout
    }

    /// Rows of a forest, in items of `step`.
    pub fn items<'f>(&self, forest: &'f Forest<'f>, step: usize) -> impl Iterator<Item = Item<'f>> + use<'f> {
        let rows = self.views[forest.view].rows as usize * self.group();
        (0..rows).step_by(step).map(move |row| Item { forest, row, rows: step.min(rows - row) })
    }

    /// Rows of an item of whole tokens.
    pub fn whole(&self) -> usize {
        (TILE / self.group()).max(1) * self.group()
    }

    /// Whether the rows of an item treat sinks as adjacent to the oldest held token.
    pub fn closed_gaps(&self, item: &Item<'_>) -> bool {
        self.views[item.forest.view].closed_gaps
    }

    pub fn codec(&self, forest: &Forest<'_>) -> Option<&'a HeadCodec> {
        self.views[forest.view].layer.codecs[forest.head].as_ref()
    }

    /// The first and the second codec, each if the forest has pages packed by it.
    pub fn codecs(&self, forest: &Forest<'_>) -> [Option<&'a HeadCodec>; 2] {
        let first = self.codec(forest);
        let second = first.and_then(|codec| Some(&codec.aged.as_ref()?.codec));
        [first.filter(|_| forest.packed[0] > 0), second.filter(|_| forest.packed[1] > 0)]
    }

    /// Most rows of a bundle.
    pub fn most(&self, forest: &Forest<'_>) -> usize {
        (self.widest)(self.inner.config.lanes, self.codecs(forest))
    }

    pub fn trees(&self, item: &Item<'_>) -> Trees<'_> {
        Trees::new(self.inner.config.lanes, self.layout(), self.codecs(item.forest), item.rows)
    }

    pub fn rotation(&self) -> Option<Rotation<'_>> {
        Some(self.table.as_ref()?.rotation(self.shape.rope?))
    }

    /// Index of (row, query head) in the call's tensors.
    pub fn row_of(&self, view: usize, row: usize, head: usize) -> usize {
        (self.views[view].start + row) * self.shape.query_heads as usize + head
    }

    /// Rows of the call that are attended, adjacent ones merged into ranges.
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

    /// Index of row `r` of an item in the call's output, in rows of one query head.
    pub fn output_row(&self, item: &Item<'_>, r: usize) -> usize {
        let (group, i) = (self.group(), item.row + r);
        self.row_of(item.forest.view, i / group, item.forest.head * group + i % group)
    }

    /// Records row `at` of the call if its exponent, sum or output shows that its scores overflowed.
    pub fn judge(&self, at: usize, m: f32, l: f32, out: &[f32]) {
        let empty = m == f32::NEG_INFINITY;
        let sound = m.abs() < TOP_SCORE && l.is_finite() && out.iter().all(|x| x.is_finite());
        if !empty && !sound {
            self.overflow.fetch_min(at, Ordering::Relaxed);
        }
    }

    /// Records an output that does not fit its dtype, if it is the first.
    pub fn note_beyond(&self, found: Option<(usize, f32)>) {
        let Some((at, value)) = found else { return };
        let mut beyond = self.beyond.lock().unwrap_or_else(PoisonError::into_inner);
        if beyond.is_none_or(|(first, _)| at < first) {
            *beyond = Some((at, value));
        }
    }

    /// The first output that does not fit its dtype.
    pub fn found_beyond(&self) -> Option<(usize, f32)> {
        *self.beyond.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
