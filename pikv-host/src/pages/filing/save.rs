//! Saves and restores layers and heads.

use super::{HeadPages, LayerPages, Original};
use crate::base::error::{Error, SaveError};
use crate::base::fields::{Fields, content, put_floats, sure};
use crate::base::ids::Place;
use crate::config::shape::CacheShape;
use crate::memory::arena::{Near, Page};
use crate::pages::entry::{Entry, PageState};
use crate::pages::ghosts::Ghosts;
use crate::pages::saved::{In, Out, Words};
use crate::pages::tags::Tags;
use pikv_core::page::{Layout, PAGE};
use pikv_core::plan::LayerShape;
use std::collections::VecDeque;

/// Length of a sequence and reach of its rollback.
#[derive(Clone, Copy)]
pub(crate) struct Reach {
    pub len: u32,
    /// First position that every ring still holds.
    pub kept: u32,
    /// Most tokens that a rollback can take back.
    pub limit: u32,
}

impl HeadPages {
    /// Adds the ring, the policy's state of it and of the head, the known pages, and the runs with filed tokens.
    pub fn save<'a>(&'a self, layout: &'a Layout, first_tile: u32, reach: Reach, to: &mut Out<'a>) {
        for (tile, page) in (first_tile..).zip(self.ring.iter()) {
            to.pages.push(Words::plain(page, layout, (reach.len - tile * PAGE).min(PAGE)));
        }
        self.ring.states().save(&mut to.fields, |_| true);
        put_floats(&mut to.fields, &self.own);
        self.ghosts.save(&mut to.fields);
        let runs = self.runs.iter().filter(|(_, run)| !run.is_fresh());
        to.fields.push(runs.clone().count() as u32);
        for (c, run) in runs {
            to.fields.push(c as u32);
            run.save(layout, reach.kept, to);
        }
    }
}

impl LayerPages {
    /// Adds the experts of tokens.
    pub fn save_tags(&self, to: &mut Vec<u32>) {
        self.tags.save(to);
    }

    /// Reads the data of [`LayerPages::save_tags`], and sets what follows from `reach`.
    ///
    /// # Errors
    /// [`content`] for invalid data.
    pub fn load_tags(
        &mut self,
        from: &mut Fields<'_>,
        inner: &CacheShape,
        reach: Reach,
    ) -> Result<(), Error> {
        let Reach { len, kept, .. } = reach;
        (self.filed, self.first_tile) = (inner.store.ring.left(len), kept / PAGE);
        self.tags = Tags::load(from, inner, len, self.first_tile)?;
        Ok(())
    }

    /// Reads the data of [`HeadPages::save`] for head `h`.
    ///
    /// # Errors
    /// [`content`] for invalid data; those of the source, and of the page memory.
    pub fn load_head(
        &mut self,
        h: usize,
        from: &mut Fields<'_>,
        input: &mut In<'_>,
        (inner, shape): (&CacheShape, &LayerShape),
        reach: Reach,
    ) -> Result<(), Error> {
        let (layout, len) = (&shape.layout, reach.len);
        let tiles = self.first_tile..len.div_ceil(PAGE);
        let mut ring: VecDeque<Page> = VecDeque::with_capacity(tiles.len());
        for tile in tiles.clone() {
            let shard = inner.shard_of(Place::Ring, tile, self.first_head + h as u32);
            let near = Near::next(ring.back());
            let Some(page) = input.wanted(shard, layout.words(), near)? else { continue };
            let first = tile * PAGE;
            let here = (first..len.min(first + PAGE)).zip(page.positions());
            sure(here.clone().all(|(is, at)| is == *at), "a token of the ring at another position")?;
            ring.push_back(page);
        }
        let head = &mut self.heads[h];
        head.ring.load(ring, from, tiles.len())?;
        from.floats(&mut head.own)?;
        head.ghosts = Ghosts::load(from, layout, inner.config.experts, len, &input.pool.ghosts)?;
        let mut least = 0;
        input.behind = 0;
        for _ in 0..from.count(6)? {
            let c = from.below(self.heads[h].runs.most(), "no such run of pages")?;
            sure(c >= least, "runs out of order")?;
            least = c + 1;
            let codecs = self.codecs.clone();
            let of = self.run_of(inner, shape, h, c, codecs[h].as_ref().filter(|_| c > 0));
            // A rollback reaches a token of each evicted page in the list.
            let gone = 1 + self.filed - reach.kept.min(self.filed);
            self.heads[h].runs[c].load(from, input, &of, gone)?;
        }
        let held = self.heads[h].runs.iter().map(|(_, run)| run.live()).sum::<u32>();
        if input.until.is_some() && held + input.behind != self.filed {
            return Err(SaveError::evicted());
        }
        self.check_filed(h, (inner, shape), reach)
    }

    /// Checks that each run has the tokens that a rollback would remove from it.
    fn check_filed(
        &self,
        h: usize,
        (inner, shape): (&CacheShape, &LayerShape),
        reach: Reach,
    ) -> Result<(), Error> {
        let mut taken = vec![0; self.heads[h].runs.most()];
        for position in inner.store.ring.left(reach.len - reach.limit)..self.filed {
            if let Some(c) = self.run_at(inner, shape, position) {
                taken[c] += 1;
            }
        }
        let enough = taken.iter().enumerate().all(|(c, n)| *n <= self.heads[h].runs[c].filed);
        sure(enough, "a run without tokens that were filed in it")
    }

    /// Lists the pages with two forms, after all heads are read.
    ///
    /// # Errors
    /// [`content`] for a page that no codec can pack twice.
    pub fn list_twice(&mut self) -> Result<(), Error> {
        let heads = self.heads.iter().enumerate();
        let entries = heads.flat_map(|(h, head)| {
            head.runs.iter().flat_map(move |(c, run)| run.entries.iter().map(move |entry| (h, c, entry)))
        });
        for (head, run, Entry { held, ordinal, .. }) in entries {
            let (PageState::Closed(closed), Some(codec)) = (held, &self.codecs[head]) else { continue };
            let (by, ordinal) = (closed.by, *ordinal);
            if closed.original.is_some() {
                self.originals.push_back(Original { head, run, ordinal, by });
            }
            if closed.next.is_some() {
                let by = codec.ages_at(by).ok_or_else(|| content("a page packed twice by one codec"))?;
                self.aging.push_back(Original { head, run, ordinal, by });
            }
        }
        self.originals.make_contiguous().sort_by_key(|page| page.by);
        self.aging.make_contiguous().sort_by_key(|page| page.by);
        let done = self.heads.first().map_or(0, |head| head.ghosts.done());
        sure(self.heads.iter().all(|head| head.ghosts.done() == done), "heads that know other tokens")
    }
}
