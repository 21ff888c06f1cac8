//! Queries of a call in the form that blocks read, and the positions that each row sees.

use crate::attend::job::{Item, Job};
use crate::attend::view::View;
use pikv_core::attend::Sight;
use pikv_core::codec::read::REBUILT;
use pikv_core::warp::LANES;
use pikv_lanes::attend::bundles;
use pikv_lanes::tile::{Tile, round_queries};
use std::cell::RefCell;

/// Queries of an item in the form that its blocks read.
#[derive(Default)]
pub struct Packed {
    pub q: Vec<f32>,
    /// The queries rounded to bf16 for tiles, if the call is fast; empty otherwise.
    pub rounded: Vec<u32>,
    /// The queries for the sinks, if gaps are closed.
    pub sinks: Vec<f32>,
    /// For each row, the positions that it sees in the pool and in the ring.
    pub sights: Vec<(Sight, Sight)>,
    /// For each codec of the head: the queries in its channels, and the constant terms of their scores.
    pub folded: [Vec<[f32; LANES]>; 2],
    pub start: [Vec<f32>; 2],
    pub rebuilt: Vec<[f32; LANES]>,
    /// Buffer for blocks of full pages, used with many rows.
    pub tile: Tile,
}

/// Buffers of a thread.
#[derive(Default)]
pub struct Scratch {
    pub packed: Packed,
    pub part: Vec<f32>,
    pub spare: Vec<Vec<f32>>,
    pub row: Vec<f32>,
    /// If masses are computed: the weights of a forest's pages in each row, and each block's exponents.
    pub raw: Vec<[f32; LANES]>,
    pub tops: Vec<f32>,
}

thread_local! {
    pub static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Job<'_> {
    /// Scales, rotates and packs the queries of an item.
    pub fn pack(&self, item: &Item<'_>, scratch: &mut Scratch) {
        let k_dim = self.shape.layout.k_dim as usize;
        let channels = self.layout().k_channels() as usize;
        let rotation = self.rotation();
        let Scratch { packed, row: source, .. } = scratch;
        packed.q.clear();
        packed.q.resize(channels * item.rows, 0.0);
        packed.sinks.clear();
        let closed_gaps = self.closed_gaps(item);
        packed.sinks.resize(if closed_gaps { packed.q.len() } else { 0 }, 0.0);
        let oldest = if closed_gaps { self.oldest(item.forest) } else { 0 };
        self.sights(item, &mut packed.sights);
        let codecs = self.codecs(item.forest);
        let cols = codecs.map(|codec| codec.map_or(0, |codec| codec.packed.query_cols() as usize));
        for (i, cols) in cols.iter().enumerate() {
            packed.start[i].clear();
            packed.folded[i].clear();
            packed.folded[i].resize(cols * item.rows, [0.0; LANES]);
        }
        let rebuilt = item.forest.has_packed() && rotation.is_some();
        packed.rebuilt.resize(if rebuilt { REBUILT } else { 0 }, [0.0; LANES]);
        let mut at = 0;
        for (row, width) in bundles(item.rows, self.most(item.forest)) {
            for r in 0..width {
                let position = self.position(item, row + r);
                let query = self.q.part(self.output_row(item, row + r) * k_dim, k_dim);
                source.resize(k_dim, 0.0);
                query.widen(source);
                if let (Some(rotation), true) = (&rotation, closed_gaps) {
                    rotation.rotate(source, self.closed(position, oldest));
                    for (c, x) in source.iter().enumerate() {
                        packed.sinks[at + c * width + r] = x * self.factor;
                    }
                    query.widen(source);
                }
                if let Some(rotation) = &rotation {
                    rotation.rotate(source, position);
                }
                for (c, x) in source.iter().enumerate() {
                    packed.q[at + c * width + r] = x * self.factor;
                }
                for (i, codec) in codecs.iter().enumerate() {
                    let Some(codec) = codec else { continue };
                    let folded = packed.folded[i][(row + r) * cols[i]..][..cols[i]].as_flattened_mut();
                    packed.start[i].push(codec.fold(source, self.factor, folded));
                }
            }
            at += channels * width;
        }
        packed.rounded.clear();
        if self.fast && rotation.is_none() {
            let (lanes, most) = (self.inner.config.lanes, self.most(item.forest));
            round_queries(lanes, self.layout(), most, &packed.q, &mut packed.rounded);
        }
    }

    /// Positions that the rows of an item see, in the pool and in the ring.
    pub fn sights(&self, item: &Item<'_>, sights: &mut Vec<(Sight, Sight)>) {
        sights.clear();
        let view = &self.views[item.forest.view];
        sights.extend((0..item.rows).map(|r| {
            let position = self.position(item, r);
            let (floor, lo) = (self.floor(view, position), self.lo(position));
            let sight = Sight { floor, lo, sinks: view.layer.store.sinks, hi: position as i32 };
            (Sight { floor: 0, hi: floor as i32 - 1, ..sight }, sight)
        }));
    }

    /// Position of row `r` of an item.
    pub fn position(&self, item: &Item<'_>, r: usize) -> u32 {
        self.views[item.forest.view].first + ((item.row + r) / self.group()) as u32
    }

    /// First position in the window of the row at `position`.
    pub(crate) fn lo(&self, position: u32) -> u32 {
        self.shape.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    /// Position of the row at `position` as the sinks see it if gaps are closed; `oldest` is the oldest token held outside the sinks.
    pub fn closed(&self, position: u32, oldest: u32) -> u32 {
        let sinks = self.views.first().map_or(0, |view| view.layer.store.sinks);
        let gap = oldest.max(self.lo(position)).saturating_sub(sinks);
        position - gap.min(position)
    }

    /// First position that the row at `position` reads in the ring: the ring's tokens up to its own, and older ones that are not filed yet.
    pub fn floor(&self, view: &View<'_>, position: u32) -> u32 {
        (position + 1).saturating_sub(self.inner.store.ring.window()).min(view.layer.filed)
    }
}
