//! What a fabric would hold and send, from the page map and the messages alone, without data.

use super::front::no_ages;
use super::wire;
use crate::cache::Cache;
use crate::codec::HeadCodec;
use crate::config::CacheConfig;
use crate::error::Error;
use pikv_core::attend::BLOCK;
use pikv_core::merge::Partial;
use pikv_core::page::PAGE;
use pikv_core::plan::LayerShape;

/// Words of a message around what it asks, and of its answer around what it says.
const AROUND: (u64, u64) = (wire::HEADER as u64 + 7, wire::HEADER as u64 + 7);

/// What goes to a rank in a decode step, and comes back.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wire {
    /// Bytes to the rank.
    pub sent: f64,
    /// Bytes of its answers.
    pub received: f64,
    /// Messages to it, as many as answers.
    pub messages: f64,
}

/// One rank of a [`Schedule`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankPlan {
    /// Bytes of full pages, and of room for the page of a block that fills up, or comes next.
    pub bytes: u64,
    /// Full pages.
    pub pages: u64,
    /// A decode step with the bits of one process.
    pub exact: Wire,
    /// The same where ranks merge ([`Options::fast`](super::Options::fast)).
    pub fast: Wire,
}

/// What the ranks of a fabric hold of one sequence, and what a decode step of one row that reads all of it sends: the messages
/// as they are built, averaged over the 256 steps in which a block fills up.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Of each rank.
    pub ranks: Vec<RankPlan>,
    /// Bytes at the front: ring, sinks and pages that fill up.
    pub front: u64,
}

impl Schedule {
    /// Of a sequence that filed `filed[e]` tokens under expert `e`, in each layer, and of whose pages block `t` of expert `e`
    /// lies on rank `of(t, e)`. O(layers * blocks of a layer).
    ///
    /// # Errors
    /// What is wrong with the configuration; pages that a second codec packs again, as [`Cache::over`].
    ///
    /// # Panics
    /// If `of` names a rank past `ranks`.
    pub fn new(
        config: &CacheConfig,
        ranks: u32,
        filed: &[u32],
        of: impl Fn(u32, u16) -> u32,
    ) -> Result<Schedule, Error> {
        let inner = Cache::new(config.clone())?.inner;
        no_ages(&inner)?;
        let store = &inner.store;
        let (mut all, mut front) = (vec![RankPlan::default(); ranks as usize], 0);
        for (shape, codecs) in config.layers.iter().zip(&inner.codecs) {
            let page = shape.layout.bytes();
            // What a row reads on each rank.
            let mut read = vec![Held::default(); ranks as usize];
            for (expert, tokens) in (0u16..).zip(filed) {
                let (full, open) = (tokens / PAGE, u64::from(tokens % PAGE > 0));
                front += open * page * u64::from(shape.kv_heads);
                for block in 0..full.div_ceil(BLOCK as u32) {
                    let here = u64::from((full - block * BLOCK as u32).min(BLOCK as u32));
                    let of = &mut read[of(block, expert) as usize];
                    of.blocks += 1;
                    of.pages += here;
                    of.fills += if here < BLOCK as u64 { open } else { 0 };
                    of.rooms += u64::from(here < BLOCK as u64);
                }
            }
            let heads = u64::from(shape.kv_heads);
            front += page * heads * u64::from((store.ring.window() + store.ring.slack()).div_ceil(PAGE) + 1);
            front += page * heads * u64::from(store.sinks.div_ceil(PAGE));
            let sum: u64 = read.iter().map(|held| held.blocks).sum();
            for (plan, held) in all.iter_mut().zip(read) {
                let bytes =
                    |codec: &Option<HeadCodec>| codec.as_ref().map_or(page, |codec| codec.packed.bytes());
                plan.pages += held.pages * heads;
                plan.bytes += (held.pages + held.rooms) * codecs.iter().map(bytes).sum::<u64>();
                let share = if sum > 0 { held.blocks as f64 / sum as f64 } else { 0.0 };
                plan.exact.add(&reads(shape, codecs, &held, sum, false));
                plan.fast.add(&reads(shape, codecs, &held, sum, true));
                let filed = files(shape, codecs, share);
                plan.exact.add(&filed);
                plan.fast.add(&filed);
            }
        }
        Ok(Schedule { ranks: all, front })
    }
}

/// Of each head: blocks on a rank, the full pages in them, and pages that fill up, which belong to one of them unless they will be packed.
#[derive(Clone, Copy, Default)]
struct Held {
    blocks: u64,
    pages: u64,
    fills: u64,
    /// Blocks that have room for another page.
    rooms: u64,
}

impl Wire {
    fn add(&mut self, other: &Wire) {
        self.sent += other.sent;
        self.received += other.received;
        self.messages += other.messages;
    }
}

/// A layer's questions to a rank, and its answers.
fn reads(shape: &LayerShape, codecs: &[Option<HeadCodec>], held: &Held, all: u64, fast: bool) -> Wire {
    let Held { blocks, pages, fills, .. } = *held;
    if blocks == 0 {
        return Wire::default();
    }
    let group = u64::from(shape.group());
    let (mut asked, mut answered, mut parts) = (0, 0, 0);
    for codec in codecs {
        let acc_rows = codec.as_ref().map_or(shape.layout.acc_rows(), |codec| codec.packed.acc_rows());
        let part = Partial::len(group as usize, acc_rows) as u64;
        let folded = codec.as_ref().map_or(0, |codec| u64::from(codec.packed.query_cols() * PAGE) + 1);
        asked += 6 + group * (u64::from(shape.layout.k_channels()) + 4 + folded) + 1 + blocks;
        asked += if codec.is_some() { 5 * pages } else { 3 * (pages + fills) };
        answered += if fast { part } else { blocks * part };
        parts += all * part;
    }
    // What all ranks answer is cut into waves.
    let most = parts.div_ceil(super::attend::WAVE as u64).clamp(1, codecs.len() as u64);
    let waves = if fast { 1 } else { most };
    Wire {
        sent: 4.0 * (waves * AROUND.0 + asked) as f64,
        received: 4.0 * (waves * AROUND.1 + answered) as f64,
        messages: waves as f64,
    }
}

/// A layer's token on its way. Pages as they came go token by token, but for the first of a block; packed ones whole. A page whose block
/// is there before it is told to be kept in the end.
fn files(shape: &LayerShape, codecs: &[Option<HeadCodec>], share: f64) -> Wire {
    let (layout, blocks, page) = (&shape.layout, BLOCK as f64, f64::from(PAGE));
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
    let words: f64 = codecs.iter().map(head).sum();
    Wire {
        sent: 4.0 * share * (words + AROUND.0 as f64 / page),
        received: 4.0 * share * AROUND.1 as f64 / page,
        messages: share / page,
    }
}
