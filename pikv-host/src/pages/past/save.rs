//! Saves and restores the changes that a rollback undoes.

use super::{Before, Compacted, Killed, Noted, Was, Went, What};
use crate::base::error::{Error, SaveError};
use crate::base::fields::{Fields, content, put_long, sure};
use crate::codec::HeadCodec;
use crate::config::shape::CacheShape;
use crate::memory::arena::Near;
use crate::pages::entry::{Entry, PageState};
use crate::pages::filing::LayerPages;
use crate::pages::homes::Homes;
use crate::pages::run::save::{Lanes, RunOf, load_bounds, save_bounds};
use crate::pages::saved::{In, Out, within};
use crate::policy::state::Apart;
use pikv_core::page::{Layout, PAGE};
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use std::collections::BTreeSet;

const FINAL: u32 = 0;
const FREED: u32 = 1;
const SLID: u32 = 2;
const COMPACTED: u32 = 3;
/// Flags of a page before a compaction.
const BOUNDED: u32 = 1;
const REWRITTEN: u32 = 1 << 1;
const HOMES: u32 = 1 << 2;

impl Killed {
    fn save(&self, to: &mut Vec<u32>) {
        to.extend([self.by, self.head as u32, self.run as u32, self.ordinal, self.lanes]);
        put_long(to, self.after);
    }

    fn load(from: &mut Fields<'_>, layer: &LayerPages) -> Result<Killed, Error> {
        let by = from.word()?;
        let (head, run) = load_run(from, layer)?;
        let [ordinal, lanes] = [from.word()?, from.word()?];
        Ok(Killed { by, head, run, ordinal, lanes, after: from.long()? })
    }
}

/// Reads the indices of a head and of a run of it.
fn load_run(from: &mut Fields<'_>, layer: &LayerPages) -> Result<(usize, usize), Error> {
    let head = from.below(layer.heads.len(), "no such KV head")?;
    Ok((head, from.below(layer.heads[head].runs.most(), "no such run of pages")?))
}

impl LayerPages {
    /// Adds the changes that a rollback undoes.
    pub fn save_past<'a>(&'a self, layout: &'a Layout, to: &mut Out<'a>) {
        let past = &self.past;
        put_long(&mut to.fields, past.next);
        to.fields.push(past.killed.len() as u32);
        past.killed.iter().for_each(|killed| killed.save(&mut to.fields));
        to.fields.push(past.noted.len() as u32);
        for Noted { id, at, head, run, dead, what } in &past.noted {
            put_long(&mut to.fields, *id);
            to.fields.extend([*at, *head as u32, *run as u32, *dead]);
            match what {
                What::Final(killed) => {
                    to.fields.push(FINAL);
                    killed.save(&mut to.fields);
                }
                What::Freed(entry) => {
                    to.fields.push(FREED);
                    entry.save(layout, false, to);
                }
                What::Slid(entry, rows) => {
                    to.fields.push(SLID);
                    entry.save(layout, false, to);
                    rows.save(&mut to.fields);
                }
                What::Compacted(compacted) => {
                    to.fields.push(COMPACTED);
                    compacted.save(layout, to);
                }
            }
        }
        to.fields.push(self.owed.len() as u32);
        self.owed.iter().for_each(|(head, run)| to.fields.extend([*head as u32, *run as u32]));
    }

    /// Reads the data of [`LayerPages::save_past`], after the heads.
    ///
    /// # Errors
    /// [`content`] for invalid data; those of the source, and of the page memory.
    pub fn load_past(
        &mut self,
        from: &mut Fields<'_>,
        input: &mut In<'_>,
        inner: &CacheShape,
        shape: &LayerShape,
    ) -> Result<(), Error> {
        let codecs = self.codecs.clone();
        self.past.next = from.long()?;
        let next = self.past.next;
        sure(next <= u64::MAX / 2, "more changes than there can be")?;
        for _ in 0..from.count(7)? {
            let killed = Killed::load(from, self)?;
            sure(killed.after <= next, "an eviction after changes to come")?;
            self.past.killed.push_back(killed);
        }
        let mut least = 0;
        for _ in 0..from.count(9)? {
            let (id, at) = (from.long()?, from.word()?);
            sure((least..next).contains(&id), "changes out of order")?;
            least = id + 1;
            let (head, run) = load_run(from, self)?;
            let dead = from.below(1 << 28, "more evicted tokens than there can be")? as u32;
            let codec = codecs[head].as_ref().filter(|_| run > 0);
            let of = self.run_of(inner, shape, head, run, codec);
            let what = match from.word()? {
                FINAL => What::Final(Killed::load(from, self)?),
                FREED => What::Freed(Box::new(held(from, input, &of)?)),
                SLID => {
                    let entry = Box::new(held(from, input, &of)?);
                    let kept = &(&mut self.heads[head].runs)[run].kept;
                    What::Slid(entry, Apart::load(from, kept)?)
                }
                COMPACTED => {
                    sure(codec.is_none() && run > 0, "packed pages that were put together")?;
                    What::Compacted(Compacted::load(from, input, &of)?)
                }
                _ => return Err(content("a change that is not known")),
            };
            self.past.noted.push_back(Noted { id, at, head, run, dead, what });
        }
        let runs = self.past.noted.iter().map(|noted| (noted.head, noted.run));
        let runs: BTreeSet<(usize, usize)> = runs.collect();
        runs.into_iter().for_each(|(head, run)| self.tie(head, run));
        for _ in 0..from.count(2)? {
            let owed = load_run(from, self)?;
            sure(!self.owed.contains(&owed), "a run that is named twice")?;
            self.owed.push(owed);
        }
        Ok(())
    }

    /// A run of the layer.
    pub fn run_of<'a>(
        &self,
        inner: &'a CacheShape,
        shape: &'a LayerShape,
        head: usize,
        run: usize,
        codec: Option<&'a HeadCodec>,
    ) -> RunOf<'a> {
        let (head, filed) = (self.first_head + head as u32, self.filed);
        RunOf { shape: inner, layout: &shape.layout, codec, head, run, filed }
    }
}

/// Reads a page that is not evicted.
fn held(from: &mut Fields<'_>, input: &mut In<'_>, of: &RunOf<'_>) -> Result<Entry, Error> {
    let entry = Entry::load(from, input, of, Near::Any)?.ok_or_else(SaveError::evicted)?;
    sure(!entry.is_gone(), "a page that is kept and gone")?;
    Ok(entry)
}

impl Compacted {
    fn save<'a>(&'a self, layout: &'a Layout, to: &mut Out<'a>) {
        to.fields.push(self.pages.len() as u32);
        for Before { ordinal, fill, live, bounds, homes, was } in &self.pages {
            let flag = |on: bool, flag| if on { flag } else { 0 };
            let flags = flag(bounds.is_some(), BOUNDED)
                | flag(matches!(was, Was::Rewritten(_)), REWRITTEN)
                | flag(homes.is_listed(), HOMES);
            to.fields.extend([*ordinal, *fill, *live, flags]);
            match was {
                Was::Replaced(held) => held.save(layout, *fill, None, to),
                Was::Rewritten(positions) => to.fields.extend(positions),
            }
            save_bounds(bounds.as_deref(), &mut to.fields);
            homes.save(&mut to.fields);
        }
        to.fields.push(self.moves.len() as u32);
        for Went { from, to: target } in &self.moves {
            to.fields.extend([from.0, from.1, target.0, target.1]);
        }
    }

    fn load(from: &mut Fields<'_>, input: &mut In<'_>, of: &RunOf<'_>) -> Result<Compacted, Error> {
        let mut pages = Vec::new();
        let mut least = 0;
        for _ in 0..from.count(5)? {
            let [ordinal, fill, live, flags] = [from.word()?, from.word()?, from.word()?, from.word()?];
            let sound = ordinal >= least && ordinal < u32::MAX / 2 && (1..=PAGE).contains(&fill);
            sure(sound && within(live, fill) && flags < 2 * HOMES, "a page as none was before")?;
            least = ordinal + 1;
            let lanes = Lanes { ordinal, fill, read: live };
            let was = if flags & REWRITTEN == 0 {
                let held = PageState::load(from, input, of, lanes, Near::Any)?;
                Was::Replaced(held.ok_or_else(SaveError::evicted)?)
            } else {
                let words = from.slice(LANES)?;
                of.positions(words, lanes, None)?;
                Was::Rewritten(std::array::from_fn(|lane| words[lane]))
            };
            let gone = matches!(was, Was::Replaced(PageState::Gone { .. }));
            sure(!gone, "a page that is kept and gone")?;
            let bounds = (flags & BOUNDED != 0).then(|| load_bounds(from, of.layout)).transpose()?;
            let homes = if flags & HOMES != 0 { of.load_homes(from)? } else { Homes::default() };
            pages.push(Before { ordinal, fill, live, bounds, homes, was });
        }
        let mut moves = Vec::new();
        for _ in 0..from.count(4)? {
            let [a, from_lane, b, to_lane] = [from.word()?, from.word()?, from.word()?, from.word()?];
            sure(from_lane < PAGE && to_lane < PAGE, "a lane that no page has")?;
            moves.push(Went { from: (a, from_lane), to: (b, to_lane) });
        }
        Ok(Compacted { pages, moves })
    }
}
