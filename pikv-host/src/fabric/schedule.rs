//! Forecast of the bytes that a fabric holds and sends, from the page map and message formats, without data.

use super::front::no_ages;
use super::wire;
use crate::base::error::Error;
use crate::base::text::{Bytes, Table};
use crate::codec::HeadCodec;
use crate::config::CacheConfig;
use crate::config::shape::{CacheShape, first_heads};
use pikv_core::attend::BLOCK;
use pikv_core::merge::Partial;
use pikv_core::page::PAGE;
use pikv_core::plan::LayerShape;
use std::fmt;

/// Words of a message without its questions, and of its answer without results.
const AROUND: (u64, u64) = (wire::HEADER as u64 + 6, wire::HEADER as u64 + 7);

/// Traffic of one rank in a decode step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Wire {
    /// Bytes to the rank.
    pub sent: f64,
    /// Bytes of its answers.
    pub received: f64,
    /// Messages to it, each with one answer.
    pub messages: f64,
}

impl std::iter::Sum for Wire {
    fn sum<I: Iterator<Item = Wire>>(wires: I) -> Wire {
        wires.fold(Wire::default(), |sum, wire| Wire {
            sent: sum.sent + wire.sent,
            received: sum.received + wire.received,
            messages: sum.messages + wire.messages,
        })
    }
}

/// One rank of a [`Schedule`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RankPlan {
    /// Bytes of full pages, and of the room for a block's page that is not full, or comes next.
    pub bytes: u64,
    /// Full pages.
    pub pages: u64,
    /// A decode step with the bits of one process.
    pub exact: Wire,
    /// A decode step in which ranks merge ([`Options::fast`](super::Options::fast)).
    pub fast: Wire,
}

/// Bytes that the ranks of a fabric hold of one sequence, and the traffic of a decode step of one row that reads all of it. Traffic is
/// averaged over the 256 steps in which a block is filled.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Schedule {
    /// One entry for each rank.
    pub ranks: Vec<RankPlan>,
    /// Bytes on the front: ring, sinks and pages that are not full.
    pub front: u64,
}

impl fmt::Display for Schedule {
    /// A table: pages of each rank, and bytes that a decode step sends to it and receives, exact and merged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::default();
        table.row([
            &"rank",
            &"pages",
            &"bytes",
            &"exact: sent",
            &"received",
            &"messages",
            &"fast: sent",
            &"received",
            &"messages",
        ]);
        for (rank, plan) in self.ranks.iter().enumerate() {
            let cells = [plan.exact, plan.fast].map(|wire| {
                let [sent, received] =
                    [wire.sent, wire.received].map(|bytes| Bytes(bytes.round() as u64).to_string());
                [sent, received, format!("{:.1}", wire.messages)]
            });
            let kept = [rank.to_string(), plan.pages.to_string(), Bytes(plan.bytes).to_string()];
            table.cells(kept.into_iter().chain(cells.into_iter().flatten()));
        }
        table.row([&"front", &"", &Bytes(self.front)]);
        table.fmt(f)
    }
}

impl Schedule {
    /// The schedule of a sequence with `filed[e]` tokens in run `e` of the experts ([`Cache::run_of`](crate::Cache::run_of)) in each
    /// layer. Rank `of(t, e, h)` holds block `t` of run `e` of KV head `h`; heads are numbered across layers.
    /// O(blocks of all heads + layers * heads of a layer * ranks).
    ///
    /// # Errors
    /// An invalid configuration; a second codec for old pages, which [`Cache::over`](crate::Cache::over) refuses too.
    ///
    /// # Panics
    /// If `of` returns a rank at or above `ranks`.
    pub fn new(
        config: &CacheConfig,
        ranks: u32,
        filed: &[u32],
        of: impl Fn(u32, u16, u32) -> u32,
    ) -> Result<Schedule, Error> {
        let checked = CacheShape::new(config.clone(), true)?;
        no_ages(&checked)?;
        let (mut all, mut front) = (vec![RankPlan::default(); ranks as usize], 0);
        let shapes = config.layers.iter().zip(first_heads(&config.layers));
        for (((shape, first), codecs), store) in shapes.zip(&checked.codecs).zip(&checked.stores) {
            let (page, heads) = (shape.layout.bytes(), u64::from(shape.kv_heads));
            let read = Read::new(shape, codecs, ranks, filed, |t, e, head| of(t, e, first + head));
            let open: u64 = filed.iter().map(|tokens| u64::from(tokens % PAGE > 0)).sum();
            front += open * page * heads;
            front += page * heads * u64::from((store.ring.window() + store.ring.slack()).div_ceil(PAGE) + 1);
            front += page * heads * u64::from(store.sinks.div_ceil(PAGE));
            for (rank, plan) in all.iter_mut().enumerate() {
                for (held, codec) in read.on(rank).zip(codecs.iter()) {
                    plan.pages += held.pages;
                    plan.bytes +=
                        (held.pages + held.rooms) * codec.as_ref().map_or(page, |codec| codec.packed.bytes());
                }
                plan.exact.add(&read.asked(rank, false));
                plan.fast.add(&read.asked(rank, true));
                let filed = read.files(rank);
                plan.exact.add(&filed);
                plan.fast.add(&filed);
            }
        }
        Ok(Schedule { ranks: all, front })
    }
}

/// A head's blocks on a rank, the full pages in them, and their pages that are not full (only if pages are not packed).
#[derive(Clone, Copy, Default)]
struct RankBlocks {
    blocks: u64,
    pages: u64,
    fills: u64,
    /// Blocks with room for another page.
    rooms: u64,
}

/// The pages that a row reads in a layer.
struct Read<'a> {
    shape: &'a LayerShape,
    codecs: &'a [Option<HeadCodec>],
    /// `[rank][head]`.
    held: Vec<RankBlocks>,
    /// For each rank: blocks of experts that it has of at least one head.
    some: Vec<u64>,
    /// Blocks of each head on all ranks.
    blocks: u64,
    /// The wave in which each head's blocks are read.
    waves: Vec<u64>,
}

impl<'a> Read<'a> {
    fn new(
        shape: &'a LayerShape,
        codecs: &'a [Option<HeadCodec>],
        ranks: u32,
        filed: &[u32],
        of: impl Fn(u32, u16, u32) -> u32,
    ) -> Read<'a> {
        let heads = shape.kv_heads;
        let mut held = vec![RankBlocks::default(); ranks as usize * heads as usize];
        // With the last block counted for the rank, from 1 on.
        let mut some = vec![(0, 0); ranks as usize];
        let mut blocks = 0;
        for (expert, tokens) in (0u16..).zip(filed) {
            let (full, open) = (tokens / PAGE, u64::from(tokens % PAGE > 0));
            for block in 0..full.div_ceil(BLOCK as u32) {
                let here = u64::from((full - block * BLOCK as u32).min(BLOCK as u32));
                blocks += 1;
                for head in 0..heads {
                    let rank = of(block, expert, head) as usize;
                    let of = &mut held[rank * heads as usize + head as usize];
                    of.blocks += 1;
                    of.pages += here;
                    of.fills += if here < BLOCK as u64 { open } else { 0 };
                    of.rooms += u64::from(here < BLOCK as u64);
                    let (sum, last) = &mut some[rank];
                    *sum += u64::from(*last != blocks);
                    *last = blocks;
                }
            }
        }
        // A wave takes heads until its answers are full.
        let (mut wave, mut words) = (0, 0);
        let waves = codecs.iter().map(|codec| {
            let more = blocks * part(shape, codec.as_ref());
            if words > 0 && words + more > super::attend::WAVE as u64 {
                (wave, words) = (wave + 1, 0);
            }
            words += more;
            wave
        });
        let waves = waves.collect();
        Read { shape, codecs, held, some: some.into_iter().map(|(sum, _)| sum).collect(), blocks, waves }
    }

    /// The blocks of each head.
    fn on(&self, rank: usize) -> impl Iterator<Item = &RankBlocks> {
        let heads = self.codecs.len();
        self.held[rank * heads..(rank + 1) * heads].iter()
    }

    /// Traffic of questions to a rank and their answers.
    fn asked(&self, rank: usize, fast: bool) -> Wire {
        let Read { shape, codecs, waves, .. } = self;
        let group = u64::from(shape.group());
        let (mut asked, mut answered, mut messages, mut last) = (0, 0, 0, None);
        for ((held, codec), wave) in self.on(rank).zip(codecs.iter()).zip(waves) {
            let RankBlocks { blocks, pages, fills, .. } = *held;
            if blocks == 0 {
                continue;
            }
            let part = part(shape, codec.as_ref());
            let folded = codec.as_ref().map_or(0, |codec| u64::from(codec.packed.query_cols() * PAGE) + 1);
            asked += 6 + group * (u64::from(shape.layout.k_channels()) + 4 + folded) + 1 + blocks;
            asked += if codec.is_some() { 5 * pages } else { 3 * (pages + fills) };
            answered += if fast { part } else { blocks * part };
            let wave = if fast { 0 } else { *wave };
            messages += u64::from(last.replace(wave) != Some(wave));
        }
        Wire {
            sent: 4.0 * (messages * AROUND.0 + asked) as f64,
            received: 4.0 * (messages * AROUND.1 + answered) as f64,
            messages: messages as f64,
        }
    }

    /// Traffic of filing a token. Pages that are not packed are sent token by token, except the first of a block; packed ones whole. Once
    /// the rank has all tokens of a page, a last message has it keep the page.
    fn files(&self, rank: usize) -> Wire {
        if self.blocks == 0 {
            return Wire::default();
        }
        let (layout, blocks, page) = (&self.shape.layout, BLOCK as f64, f64::from(PAGE));
        let kept = 2.0 / page * (blocks - 1.0) / blocks;
        let head = |codec: &Option<HeadCodec>| {
            let whole = |words: u32| (3.0 + f64::from(words)) / page;
            kept + match codec {
                Some(codec) => whole(codec.packed.words()),
                None => {
                    let token = 5.0 + wire::token_words(layout) as f64;
                    ((blocks - 1.0) * token + whole(layout.words())) / blocks
                }
            }
        };
        let share = |n: u64| n as f64 / self.blocks as f64;
        let words: f64 =
            self.on(rank).zip(self.codecs).map(|(held, codec)| share(held.blocks) * head(codec)).sum();
        // Blocks of several heads on one rank share a message.
        let messages = share(self.some[rank]) / page;
        Wire {
            sent: 4.0 * (words + messages * AROUND.0 as f64),
            received: 4.0 * messages * AROUND.1 as f64,
            messages,
        }
    }
}

/// Words of a partial result of a head's rows.
fn part(shape: &LayerShape, codec: Option<&HeadCodec>) -> u64 {
    let acc_rows = codec.map_or(shape.layout.acc_rows(), |codec| codec.packed.acc_rows());
    Partial::len(shape.group() as usize, acc_rows) as u64
}

impl Wire {
    fn add(&mut self, other: &Wire) {
        self.sent += other.sent;
        self.received += other.received;
        self.messages += other.messages;
    }
}
