//! Sends queries to ranks, and joins their results in the reduction tree.

use super::file::{ByRank, run_id};
use super::front::{Front, first_alive};
use super::link::Link;
use super::wire::{self, flag};
use crate::attend::cpu::Cpu;
use crate::attend::executor::TaskLists;
use crate::attend::executor::{Executor, Results};
use crate::attend::feedback::HeadFeedback;
use crate::attend::forest::Forest;
use crate::attend::job::Elsewhere;
use crate::attend::job::{Item, Job, TILE, Widest};
use crate::attend::mass::WeightSets;
use crate::attend::queries::{SCRATCH, Scratch};
use crate::base::error::Error;
use crate::base::error::FabricError;
use crate::base::host_slice::SharedRows;
use crate::base::ids::Place;
use crate::base::parallel::{Shared, each, each_mut};
use crate::tiers::replica::{Copies, Copy};
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Most words of answers of a wave of items, unless it is a single item: 64 MiB.
pub(super) const WAVE: usize = 16 << 20;

/// A row of the call and a block of its forest.
type Key = (usize, usize, usize, usize);

/// Position of a rank's results.
#[derive(Clone, Copy)]
struct At {
    answer: usize,
    word: usize,
    part: usize,
    raw: usize,
}

/// The ranks' answers to the items of a wave.
#[derive(Default)]
pub(crate) struct Remote {
    answers: Vec<Vec<u32>>,
    blocks: HashMap<Key, At>,
    /// One for each rank and form of page, if ranks merge: `true` for packed pages.
    merged: HashMap<(usize, usize, usize), Vec<(bool, At)>>,
}

impl Remote {
    fn words(&self, at: &At, from: usize, n: usize) -> &[f32] {
        bytemuck::cast_slice(&self.answers[at.answer][at.word + from..][..n])
    }
}

impl Elsewhere for Remote {
    fn place(
        &self,
        item: &Item<'_>,
        block: usize,
        part: &mut [f32],
        raw: Option<&mut [[f32; LANES]]>,
    ) -> bool {
        let Some(at) = self.blocks.get(&(item.forest.view, item.forest.head, item.row, block)) else {
            return false;
        };
        part[..at.part].copy_from_slice(self.words(at, 0, at.part));
        if let Some(raw) = raw {
            raw.as_flattened_mut().copy_from_slice(self.words(at, at.part, at.raw));
            // Ignore weights that a rank reports for tokens that are not held.
            let pages = &item.forest.pages[item.forest.blocks[block].clone()];
            for (weights, page) in
                raw.iter_mut().zip(pages.iter().cycle()).filter(|(_, page)| page.live != u32::MAX)
            {
                (0..LANES).filter(|lane| page.live >> lane & 1 == 0).for_each(|lane| weights[lane] = 0.0);
            }
        }
        true
    }
}

/// A block that a rank reads.
struct AskedBlock {
    rank: u32,
    block: usize,
    packed: bool,
    /// Held until the answer arrives, so that a page that moves in the meantime is kept.
    pages: SmallVec<[Arc<Copy>; 8]>,
}

/// The result that a question's answer holds.
enum For {
    Block(Key, At),
    Merged((usize, usize, usize), bool, At),
}

/// Options of questions.
#[derive(Clone, Copy)]
struct AskOptions {
    raw: bool,
    fast: bool,
}

/// Whether a rank reads this block of a forest.
fn is_remote(forest: &Forest<'_>, block: usize) -> bool {
    forest.pages[forest.blocks[block].clone()].iter().any(|page| page.slot.is_some())
}

impl Front {
    /// The rank that reads each block of a forest.
    fn plan(
        &self,
        link: &mut Link,
        job: &Job<'_>,
        layer: usize,
        forest: &Forest<'_>,
        work: &mut ByRank,
        loads: &mut [u64],
    ) -> Result<Vec<AskedBlock>, FabricError> {
        let mut asked = Vec::new();
        for block in (0..forest.blocks.len()).filter(|block| is_remote(forest, *block)) {
            let pages = &forest.pages[forest.blocks[block].clone()];
            let packed = forest.codec(block).is_some();
            let Place::Run(expert) = pages[0].id.place else {
                unreachable!("sinks and ring stay at the front")
            };
            let run = &job.views[forest.view].layer.heads[forest.head].runs[usize::from(expert) + 1];
            let held: SmallVec<[Option<Copies>; 8]> = pages
                .iter()
                .map(|page| page.slot.and_then(|slot| slot.rank_page()).map(|kept| kept.copies()))
                .collect();
            // Of the ranks with all remote pages of the block: one that has its other pages too, else the one with the least work.
            let mut ranks: SmallVec<[u32; 4]> = SmallVec::new();
            let mut first = true;
            for copies in held.iter().flatten() {
                let alive = |copy: &&Arc<Copy>| link.lost[copy.rank as usize].is_none();
                if first {
                    ranks = copies.iter().filter(alive).map(|copy| copy.rank).collect();
                    first = false;
                } else {
                    ranks.retain(|rank| copies.iter().filter(alive).any(|copy| copy.rank == *rank));
                }
                first_alive(link, copies)?;
            }
            let mut here = pages.iter().filter(|page| page.slot.is_none()).map(|page| page.id.ordinal);
            let mirrored = here.find_map(|ordinal| run.mirrors.rank(ordinal..ordinal + 1));
            let rank = match mirrored.filter(|rank| ranks.contains(rank)) {
                Some(rank) => rank,
                None => match ranks.iter().min_by_key(|rank| (loads[**rank as usize], **rank)) {
                    Some(rank) => *rank,
                    // No rank has all of them, as pages were sent while others moved: copy them to one rank.
                    None => self.unite(link, pages.iter().filter_map(|page| page.slot))?,
                },
            };
            let mut bytes = 0;
            let mut ids = SmallVec::new();
            for page in pages {
                let copy = match page.slot.and_then(|slot| slot.rank_page()) {
                    Some(kept) => kept.copies().into_iter().find(|copy| copy.rank == rank),
                    None => run.mirror(
                        self,
                        run_id(layer, forest.head, usize::from(expert) + 1),
                        (&job.shape.layout, packed),
                        page.id.ordinal,
                        (rank, link.epoch),
                        work.of(rank),
                    ),
                };
                bytes += page.slot.map_or(4 * page.words.len() as u64, |slot| slot.bytes());
                ids.push(copy.ok_or(FabricError::Malformed { rank, what: "a page has no copy there" })?);
            }
            loads[rank as usize] += bytes;
            self.count_read(layer, expert, bytes);
            asked.push(AskedBlock { rank, block, packed, pages: ids });
        }
        Ok(asked)
    }

    /// Sends the ranks the questions of some items.
    fn ask(
        &self,
        job: &Job<'_>,
        layer: usize,
        items: &[(&Forest<'_>, Range<usize>)],
        options: AskOptions,
    ) -> Result<Remote, Error> {
        let mut link = self.link();
        link.unsure = true;
        let remote = self.ask_through(&mut link, job, layer, items, options)?;
        link.unsure = false;
        Ok(remote)
    }

    fn ask_through(
        &self,
        link: &mut Link,
        job: &Job<'_>,
        layer: usize,
        items: &[(&Forest<'_>, Range<usize>)],
        options: AskOptions,
    ) -> Result<Remote, FabricError> {
        let mut work = ByRank::default();
        let mut loads = vec![0; link.lost.len()];
        let mut asked: Vec<(*const Forest<'_>, Vec<AskedBlock>)> = Vec::new();
        // In the order of each rank's answer.
        let mut order: HashMap<u32, Vec<For>> = HashMap::new();
        for (forest, rows) in items {
            let at = std::ptr::from_ref(*forest);
            if asked.last().is_none_or(|(of, _)| !std::ptr::eq(*of, at)) {
                asked.push((at, self.plan(link, job, layer, forest, &mut work, &mut loads)?));
            }
            let Some((_, blocks)) = asked.last() else { continue };
            let item = Item { forest, row: rows.start, rows: rows.len() };
            SCRATCH.with_borrow_mut(|scratch| {
                job.pack(&item, scratch);
                for rank in 0..loads.len() as u32 {
                    for packed in [true, false] {
                        let mine = |asked: &&AskedBlock| (asked.rank, asked.packed) == (rank, packed);
                        let mine: SmallVec<[&AskedBlock; 8]> = blocks.iter().filter(mine).collect();
                        if mine.is_empty() {
                            continue;
                        }
                        let work = work.of(rank);
                        work.asks.items += 1;
                        let question = Question { job, layer, item: &item, scratch, packed, options };
                        question.write(&mine, &mut work.asks.words);
                        expect(job, &item, packed, options, &mine, order.entry(rank).or_default());
                    }
                }
            });
        }
        let mut remote = Remote::default();
        for answer in self.work(link, work.into_list())? {
            let mut word = answer.at;
            let index = remote.answers.len();
            for of in order.remove(&answer.rank).unwrap_or_default() {
                let (For::Block(_, at) | For::Merged(.., at)) = &of;
                let at = At { answer: index, word, ..*at };
                word += at.part + at.raw;
                match of {
                    For::Block(key, _) => _ = remote.blocks.insert(key, at),
                    For::Merged(key, packed, _) => remote.merged.entry(key).or_default().push((packed, at)),
                }
            }
            if word != answer.words.len() {
                return Err(FabricError::Malformed {
                    rank: answer.rank,
                    what: "an answer of another length",
                });
            }
            remote.answers.push(answer.words);
        }
        Ok(remote)
    }
}

/// A question to a rank about one head's rows: their blocks there, packed or not.
struct Question<'a> {
    job: &'a Job<'a>,
    layer: usize,
    item: &'a Item<'a>,
    scratch: &'a Scratch,
    packed: bool,
    options: AskOptions,
}

impl Question<'_> {
    /// Appends it to a message.
    fn write(&self, blocks: &[&AskedBlock], out: &mut Vec<u32>) {
        let set = |on: bool, bit| if on { bit } else { 0 };
        let flags = set(self.options.raw, flag::RAW)
            | set(self.packed, flag::PACKED)
            | set(self.options.fast, flag::FAST)
            | set(self.job.softcap.is_some(), flag::CAPPED);
        let cap = self.job.softcap.unwrap_or(0.0).to_bits();
        let most = self.job.most(self.item.forest) as u32;
        out.extend([
            self.layer as u32,
            self.item.forest.head as u32,
            self.item.rows as u32,
            most,
            flags,
            cap,
        ]);
        out.extend_from_slice(bytemuck::cast_slice(&self.scratch.packed.q));
        for (pool, _) in &self.scratch.packed.sights {
            out.extend([pool.floor, pool.lo, pool.sinks, pool.hi as u32]);
        }
        if self.packed {
            out.extend_from_slice(bytemuck::cast_slice(self.scratch.packed.folded[0].as_flattened()));
            out.extend_from_slice(bytemuck::cast_slice(&self.scratch.packed.start[0]));
        }
        let count = out.len();
        out.push(0);
        for AskedBlock { block, pages, .. } in blocks {
            out[count] += 1;
            out.push(pages.len() as u32);
            let listed = &self.item.forest.pages[self.item.forest.blocks[*block].clone()];
            for (copy, page) in pages.iter().zip(listed) {
                wire::push_u64(out, copy.id);
                out.push(page.live);
                if self.packed {
                    out.extend([page.last, page.by]);
                }
            }
        }
    }
}

/// Records the layout of the answer to a question.
fn expect(
    job: &Job<'_>,
    item: &Item<'_>,
    packed: bool,
    options: AskOptions,
    blocks: &[&AskedBlock],
    to: &mut Vec<For>,
) {
    let part = job.trees(item).of(packed.then_some(0)).len();
    let (view, head, row) = (item.forest.view, item.forest.head, item.row);
    let at = |raw| At { answer: 0, word: 0, part, raw };
    if options.fast {
        return to.push(For::Merged((view, head, row), packed, at(0)));
    }
    to.extend(blocks.iter().map(|AskedBlock { block, pages, .. }| {
        let raw = if options.raw { item.rows * pages.len() * LANES } else { 0 };
        For::Block((view, head, row, *block), at(raw))
    }));
}

/// Words of the answers to an item.
fn size(job: &Job<'_>, item: &Item<'_>, options: AskOptions) -> usize {
    let trees = job.trees(item);
    let raw = if options.raw { 8 * item.rows * LANES } else { 0 };
    let of = |block: usize| trees.of(item.forest.codec(block)).len() + raw;
    (0..item.forest.blocks.len()).filter(|block| is_remote(item.forest, *block)).map(of).sum()
}

/// The part of a forest that the front reads.
fn near<'a>(forest: &Forest<'a>) -> Forest<'a> {
    let mut near = Forest {
        view: forest.view,
        head: forest.head,
        pages: forest.pages.clone(),
        blocks: Vec::new(),
        index: Vec::new(),
        runs: Vec::new(),
        run_blocks: Vec::new(),
        packed: [0, 0],
    };
    for (run, (index, blocks)) in forest.runs.iter().zip(&forest.run_blocks).enumerate() {
        let first = near.blocks.len();
        for block in blocks.clone().filter(|block| !is_remote(forest, *block)) {
            near.blocks.push(forest.blocks[block].clone());
            near.index.push(forest.index[block]);
        }
        if near.blocks.len() > first {
            near.runs.push(*index);
            near.run_blocks.push(first..near.blocks.len());
            near.packed[0] += usize::from(forest.codec_of_run(run).is_some());
        }
    }
    near
}

impl Executor for Front {
    fn widest(&self) -> Widest {
        Cpu.widest()
    }

    fn run(
        &self,
        job: &mut Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[WeightSets]>,
        results: Results<'_>,
        cut: &mut TaskLists,
    ) -> Result<(), Error> {
        if !forests.iter().any(|forest| forest.away().next().is_some()) {
            return Cpu.run(job, forests, wanted, results, cut);
        }
        let Results { mut out, lse, seen } = results;
        attend(self, job, forests, wanted, &out.shared(), &Shared::new(lse), seen)
    }
}

/// Attention on the CPU, over pages on the front and on ranks.
fn attend(
    front: &Front,
    job: &mut Job<'_>,
    forests: &[Forest<'_>],
    wanted: Option<&[WeightSets]>,
    out: &SharedRows<'_>,
    lse: &Shared<'_>,
    feeds: &mut [HeadFeedback],
) -> Result<(), Error> {
    let options = AskOptions { raw: wanted.is_some(), fast: front.fast && wanted.is_none() };
    let step = if options.raw { job.whole() } else { TILE };
    let mut next = 0;
    let mut rest: Vec<Item<'_>> = Vec::new();
    // With masses, a wave holds whole forests.
    while next < forests.len() || !rest.is_empty() {
        let (mut words, mut items, from) = (0, Vec::new(), next);
        loop {
            if rest.is_empty() {
                let Some(forest) = forests.get(next) else { break };
                let more: usize = job.items(forest, step).map(|item| size(job, &item, options)).sum();
                if options.raw && words > 0 && words + more > WAVE {
                    break;
                }
                rest = job.items(forest, step).collect();
                rest.reverse();
                next += 1;
            }
            let Some(item) = rest.pop() else { continue };
            let more = size(job, &item, options);
            if !options.raw && words > 0 && words + more > WAVE {
                rest.push(item);
                break;
            }
            words += more;
            items.push(item);
        }
        let questions: Vec<_> =
            items.iter().map(|item| (item.forest, item.row..item.row + item.rows)).collect();
        let some = words > 0;
        let remote =
            if some { Some(Arc::new(front.ask(job, job.layer, &questions, options)?)) } else { None };
        job.remote = remote.clone().map(|remote| remote as Arc<dyn Elsewhere>);
        let job = &*job;
        match wanted {
            Some(wanted) => each_mut(&mut feeds[from..next], |i, feed| {
                let forest = &forests[from + i];
                job.with_mass(forest, &wanted[forest.view], out, lse, &mut feed.weighed);
            }),
            None => {
                let merged = remote.as_deref().filter(|_| options.fast);
                each(&items, |item| one(job, item, options.fast, merged, out, lse));
            }
        }
    }
    job.remote = None;
    Ok(())
}

/// Computes an item; if ranks merge, with their results in `merged`.
fn one(
    job: &Job<'_>,
    item: &Item<'_>,
    fast: bool,
    merged: Option<&Remote>,
    out: &SharedRows<'_>,
    lse: &Shared<'_>,
) {
    let here = fast.then(|| near(item.forest));
    let read = Item { forest: here.as_ref().unwrap_or(item.forest), ..*item };
    job.with_scratch(&read, |trees, scratch, leaf| {
        let Scratch { part, spare, .. } = scratch;
        let full = trees.of(None);
        part.resize(full.len().max(part.len()), 0.0);
        read.forest.reduce(&trees, leaf, part, spare);
        if let Some(remote) = merged {
            let key = (item.forest.view, item.forest.head, item.row);
            // The trees of local pages lack a codec whose pages are all on ranks.
            let all = job.trees(item);
            for (packed, at) in remote.merged.get(&key).into_iter().flatten() {
                let mut theirs = remote.words(at, 0, at.part).to_vec();
                if *packed {
                    let mut whole = vec![0.0; full.len()];
                    all.unpack(0, &mut theirs, &mut whole);
                    theirs = whole;
                }
                full.join(&mut part[..full.len()], &mut theirs);
            }
        }
        job.finish(item, &full.partial(part), out, lse);
    });
}
