//! A question: rows of a KV head and the blocks to read, answered by partial results.

use super::wire::{Reader, flag};
use crate::attend::reduce::Tree;
use crate::attend::tree::Subtree;
use crate::base::rope_tables::Table;
use crate::codec::HeadCodec;
use crate::memory::arena::Page;
use crate::memory::pool::Pool;
use pikv_core::attend::{BLOCK, Sight};
use pikv_core::codec::read::{PackedRef, REBUILT};
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use pikv_lanes::attend::{Block, Common, PACKED_ROWS, PackedBlock};
use pikv_lanes::tile::Tile;
use smallvec::SmallVec;
use std::sync::Arc;

/// A question.
pub(crate) struct Ask<'a> {
    layer: usize,
    pub shape: &'a LayerShape,
    /// Codec of the pages, if they are packed.
    pub codec: Option<&'a HeadCodec>,
    table: Option<Arc<Table>>,
    pub rows: usize,
    /// Most rows of a bundle of queries.
    pub most: usize,
    pub softcap: Option<f32>,
    /// Whether the weight of every token is wanted too.
    pub raw: bool,
    /// Whether one result is wanted for all blocks; then no weights are.
    pub merged: bool,
    /// In bundles, as in [`Common::q`].
    pub q: &'a [f32],
    pub sights: Vec<(Sight, Sight)>,
    /// `[rows][query_cols]` rows of queries folded by the codec.
    pub folded: &'a [[f32; LANES]],
    pub start: &'a [f32],
    pub blocks: Vec<SmallVec<[AskedPage<'a>; BLOCK]>>,
}

/// A page of a question.
pub(crate) struct AskedPage<'a> {
    pub page: &'a Page,
    pub live: u32,
    pub last: u32,
    pub by: u32,
}

impl<'a> Ask<'a> {
    /// Reads all but blocks and table; `None` for words that are not a question.
    pub fn read(pool: &'a Pool, reader: &mut Reader<'a>) -> Option<Ask<'a>> {
        let (layer, head) = (reader.word()? as usize, reader.word()? as usize);
        let (rows, most, flags) = (reader.word()? as usize, reader.word()? as usize, reader.word()?);
        let cap = f32::from_bits(reader.word()?);
        let on = |bit| flags & bit != 0;
        let shape = pool.shape.config.layers.get(layer)?;
        let codec = pool.shape.codecs[layer].get(head)?.as_ref().filter(|_| on(flag::PACKED));
        // Front and rank have lanes of the same width.
        let widest =
            pool.shape.config.lanes.rows().min(if codec.is_some() { PACKED_ROWS } else { usize::MAX });
        if rows == 0 || most == 0 || most > widest || codec.is_some() != on(flag::PACKED) {
            return None;
        }
        let q = bytemuck::cast_slice(reader.words(shape.layout.k_channels() as usize * rows)?);
        let mut sights = Vec::with_capacity(rows);
        for sight in reader.words(4 * rows)?.as_chunks::<4>().0 {
            let [floor, lo, sinks, hi] = *sight;
            sights.push((Sight { floor, lo, sinks, hi: hi as i32 }, Sight::NONE));
        }
        let (mut folded, mut start): (&[[f32; LANES]], &[f32]) = (&[], &[]);
        if let Some(codec) = codec {
            let cols = codec.packed.query_cols() as usize;
            folded = bytemuck::cast_slice::<_, f32>(reader.words(cols * rows * LANES)?).as_chunks().0;
            start = bytemuck::cast_slice(reader.words(rows)?);
        }
        Some(Ask {
            layer,
            shape,
            codec,
            table: None,
            rows,
            most,
            softcap: on(flag::CAPPED).then_some(cap),
            raw: on(flag::RAW) && !on(flag::FAST),
            merged: on(flag::FAST),
            q,
            sights,
            folded,
            start,
            blocks: Vec::new(),
        })
    }

    /// The rotation that its keys still need, and the last position to rotate to; `None` for keys that come rotated.
    pub fn turned(&self) -> Option<(usize, u32)> {
        self.shape.rope?;
        let last = |of: &AskedPage<'_>| {
            let positions = of.page.words().iter().zip(0..LANES).filter(|(_, lane)| of.live >> lane & 1 == 1);
            match self.codec {
                Some(_) => of.last,
                None => positions.map(|(position, _)| *position).max().unwrap_or(0),
            }
        };
        Some((self.layer, self.blocks.iter().flatten().map(last).max().unwrap_or(0)))
    }

    /// Takes the table of its rotation, which must cover its last position.
    pub fn take_table(&mut self, pool: &Pool) {
        self.table = pool.tables.get(self.layer);
    }

    /// Number of words of its answer.
    pub fn answer_words(&self) -> usize {
        let len = Partial::len(self.rows, self.acc_rows());
        let raw = |pages: &SmallVec<[AskedPage<'_>; BLOCK]>| {
            if self.raw { self.rows * pages.len() * LANES } else { 0 }
        };
        if self.merged { len } else { self.blocks.iter().map(|pages| len + raw(pages)).sum() }
    }

    /// Number of words of one of its pages.
    pub fn words(&self) -> u32 {
        self.codec.map_or(self.shape.layout.words(), |codec| codec.packed.words())
    }

    /// Bytes of pages that its bundles of rows read.
    pub fn bytes_read(&self) -> u64 {
        let pages: usize = self.blocks.iter().map(SmallVec::len).sum();
        u64::from(self.words()) * 4 * pages as u64 * self.rows.div_ceil(self.most) as u64
    }

    pub fn acc_rows(&self) -> u32 {
        self.codec.map_or(self.shape.layout.acc_rows(), |codec| codec.packed.acc_rows())
    }

    pub fn common(&self) -> Common<'_> {
        let rotation = self.table.as_ref().zip(self.shape.rope);
        Common {
            layout: &self.shape.layout,
            sights: &self.sights,
            ring: false,
            softcap: self.softcap,
            most: self.most,
            q: self.q,
            rotation: rotation.map(|(table, rope)| table.rotation(rope)),
            rounded: &[],
        }
    }

    /// The table of the rotation that its keys still want.
    pub fn table(&self) -> Option<&Table> {
        self.table.as_deref()
    }

    /// The partial results of the blocks, each with its weights if they are wanted, for pages in host memory.
    pub fn compute(&self, pool: &Pool) -> Vec<f32> {
        let (lanes, common, acc_rows) = (pool.shape.config.lanes, self.common(), self.acc_rows());
        let len = Partial::len(self.rows, acc_rows);
        let turned = self.codec.is_some() && common.rotation.is_some();
        let mut rebuilt = vec![[0.0; LANES]; if turned { REBUILT } else { 0 }];
        let mut tile = Tile::default();
        let mut block = |i: usize, part: &mut [f32], raw: Option<&mut [[f32; LANES]]>| {
            let pages = &self.blocks[i];
            let after = self.blocks.get(i + 1).map_or(&[][..], |pages| pages);
            let next = [0, 1].map(|i| after.get(i).map_or(&[][..], |of| of.page.words()));
            let out = Partial::new(part, self.rows, acc_rows);
            match self.codec {
                Some(codec) => {
                    let refs = pages.iter().map(|of| {
                        let AskedPage { page, live, last, by } = *of;
                        PackedRef { words: page.words(), live, last, by }
                    });
                    let list: SmallVec<[PackedRef<'_>; BLOCK]> = refs.collect();
                    PackedBlock {
                        common,
                        packed: &codec.packed,
                        back: codec.back(),
                        pages: &list,
                        next: next[0],
                        folded: self.folded,
                        start: self.start,
                        rebuilt: &mut rebuilt,
                        out,
                        first: 0,
                        raw,
                    }
                    .run(lanes);
                }
                None => {
                    let refs = pages.iter().map(|of| PageRef { words: of.page.words(), live: of.live });
                    let list: SmallVec<[PageRef<'_>; BLOCK]> = refs.collect();
                    let tile = Some(&mut tile);
                    Block { common, pages: &list, next, out, first: 0, raw, tile }.run(lanes);
                }
            }
        };
        if self.merged {
            let mut all = vec![0.0; len];
            let tree = Tree { lanes, acc_rows, rows: self.rows };
            let index: Vec<u32> = (0..self.blocks.len() as u32).collect();
            let mut leaf = |i: usize, part: &mut [f32], _: &mut Vec<Vec<f32>>| block(i, part, None);
            tree.reduce(Subtree::whole(&index, 0), &mut leaf, &mut all, &mut Vec::new());
            return all;
        }
        let mut all = Vec::new();
        for (i, pages) in self.blocks.iter().enumerate() {
            let at = all.len();
            all.resize(at + len, 0.0);
            if !self.raw {
                block(i, &mut all[at..], None);
                continue;
            }
            let mut raw = vec![[0.0; LANES]; self.rows * pages.len()];
            block(i, &mut all[at..], Some(&mut raw));
            all.extend_from_slice(raw.as_flattened());
        }
        all
    }
}
