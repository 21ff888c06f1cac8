//! One block of pages, for the rows of an item.

use crate::attend::forest::ListedPage;
use crate::attend::job::{Item, Job};
use crate::attend::queries::Packed;
use crate::base::ids::Place;
use pikv_core::attend::BLOCK;
use pikv_core::codec::read::PackedRef;
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::page::MAX_DIM;
use pikv_core::warp::LANES;
use pikv_lanes::attend::{Block, Common, PackedBlock, Raw, bundles};

fn reference<'a>(page: &ListedPage<'a>) -> PackedRef<'a> {
    let ListedPage { words, live, last, by, .. } = *page;
    PackedRef { words, live, last, by }
}

impl Job<'_> {
    /// Computes one block of an item, by the form of its pages.
    pub fn block(
        &self,
        item: &Item<'_>,
        block: usize,
        packed: &mut Packed,
        part: &mut [f32],
        mut raw: Raw<'_>,
    ) {
        if let Some(remote) = &self.remote
            && remote.place(item, block, part, raw.as_deref_mut())
        {
            return;
        }
        let (forest, lanes) = (item.forest, self.inner.config.lanes);
        let pages = forest.blocks[block].clone();
        let next = [0, 1].map(|i| forest.pages.get(pages.end + i).map_or(&[][..], |page| page.words));
        let pages = &forest.pages[pages];
        let common = Common {
            layout: self.layout(),
            sights: &packed.sights,
            ring: pages[0].id.place == Place::Ring,
            softcap: self.softcap,
            most: self.most(forest),
            q: match pages[0].id.place {
                Place::Sinks if self.closed_gaps(item) => &packed.sinks,
                _ => &packed.q,
            },
            rotation: self.rotation(),
            rounded: &packed.rounded,
        };
        let at = forest.codec(block);
        match at.and_then(|at| Some((at, self.codecs(forest)[at]?))) {
            Some((at, codec)) => {
                let all = PackedBlock {
                    common,
                    packed: &codec.packed,
                    back: codec.back(),
                    pages: &[],
                    next: next[0],
                    folded: &packed.folded[at],
                    start: &packed.start[at],
                    rebuilt: &mut packed.rebuilt,
                    out: Partial::new(part, item.rows, codec.packed.acc_rows()),
                    first: 0,
                    raw: None,
                };
                self.packed(pages, all, raw);
            }
            _ if forest.is_mixed(block) => self.mixed(item, pages, common, part, raw),
            _ => {
                let mut list = [PageRef { words: &[], live: 0 }; BLOCK];
                for (to, from) in list.iter_mut().zip(pages) {
                    *to = PageRef { words: from.words, live: from.live };
                }
                let out = Partial::new(part, item.rows, self.layout().acc_rows());
                let tile = Some(&mut packed.tile);
                Block { common, pages: &list[..pages.len()], next, out, first: 0, raw, tile }.run(lanes);
            }
        }
    }

    /// A block of packed pages. If some of them were packed again, each row is attended on its own, over the forms that it reads. This
    /// happens only while a rollback can restore the first form.
    fn packed(&self, pages: &[ListedPage<'_>], mut all: PackedBlock<'_>, mut raw: Raw<'_>) {
        let lanes = self.inner.config.lanes;
        let mut list = [PackedRef { words: &[], live: 0, last: 0, by: 0 }; BLOCK];
        if pages.iter().all(|page| page.until.is_none()) {
            list.iter_mut().zip(pages).for_each(|(to, from)| *to = reference(from));
            PackedBlock { pages: &list[..pages.len()], raw, ..all }.run(lanes);
            return;
        }
        // Pages that a row does not read have weight 0 in it.
        raw.iter_mut().for_each(|raw| raw.fill([0.0; LANES]));
        let (common, cols) = (all.common, all.packed.query_cols() as usize);
        let channels = self.layout().k_channels() as usize;
        let mut single = [0.0; MAX_DIM as usize];
        let single = &mut single[..channels];
        let mut weights = [[0.0; LANES]; BLOCK];
        for (first, width) in bundles(common.sights.len(), common.most) {
            let bundle = &common.q[first * channels..][..width * channels];
            for row in first..first + width {
                for (single, rows) in single.iter_mut().zip(bundle.chunks_exact(width)) {
                    *single = rows[row - first];
                }
                let hi = common.sights[row].0.hi;
                let (mut at, mut n) = ([0; BLOCK], 0);
                for (i, page) in pages.iter().enumerate() {
                    if page.is_young_to(hi) {
                        (list[n], at[n]) = (reference(page), i);
                        n += 1;
                    }
                }
                let Partial { m, l, acc } = &mut all.out;
                PackedBlock {
                    common: Common { sights: &common.sights[row..row + 1], q: single, ..common },
                    packed: all.packed,
                    back: all.back,
                    pages: &list[..n],
                    next: &[],
                    folded: &all.folded[row * cols..(row + 1) * cols],
                    start: &all.start[row..row + 1],
                    rebuilt: &mut *all.rebuilt,
                    out: Partial { m, l, acc },
                    first: row,
                    raw: raw.is_some().then_some(&mut weights[..n]),
                }
                .run(lanes);
                if let Some(raw) = &mut raw {
                    for (at, weights) in at[..n].iter().zip(&weights) {
                        raw[row * pages.len() + at] = *weights;
                    }
                }
            }
        }
    }

    /// A block of open pages some of which were packed since: each row reads the page that was open at its position, so that the result
    /// does not depend on later rows of the same step. Rare: a page is in this state once.
    fn mixed(
        &self,
        item: &Item<'_>,
        pages: &[ListedPage<'_>],
        common: Common<'_>,
        part: &mut [f32],
        mut raw: Raw<'_>,
    ) {
        // Pages that a row does not read have weight 0 in it.
        raw.iter_mut().for_each(|raw| raw.fill([0.0; LANES]));
        let channels = self.layout().k_channels() as usize;
        let mut single = [0.0; MAX_DIM as usize];
        let single = &mut single[..channels];
        let mut weights = [[0.0; LANES]; BLOCK];
        for (first, width) in bundles(item.rows, common.most) {
            let bundle = &common.q[first * channels..][..width * channels];
            for r in 0..width {
                let hi = common.sights[first + r].0.hi;
                for (single, rows) in single.iter_mut().zip(bundle.chunks_exact(width)) {
                    *single = rows[r];
                }
                let mut list = [PageRef { words: &[], live: 0 }; BLOCK];
                let mut at = [0; BLOCK];
                let mut n = 0;
                for (i, page) in pages.iter().enumerate().filter(|(_, page)| page.is_open_to(hi)) {
                    (list[n], at[n]) = (PageRef { words: page.words, live: page.live }, i);
                    n += 1;
                }
                let row = first + r;
                Block {
                    common: Common { sights: &common.sights[row..row + 1], q: single, ..common },
                    pages: &list[..n],
                    next: [&[]; 2],
                    out: Partial::new(part, item.rows, self.layout().acc_rows()),
                    first: row,
                    raw: raw.is_some().then_some(&mut weights[..n]),
                    tile: None,
                }
                .run(self.inner.config.lanes);
                if let Some(raw) = &mut raw {
                    for (at, weights) in at[..n].iter().zip(&weights) {
                        raw[row * pages.len() + at] = *weights;
                    }
                }
            }
        }
    }
}
