//! What a fabric would hold and send, from the page map and the messages alone, without data.

use super::wire;
use crate::cache::Cache;
use crate::config::CacheConfig;
use crate::error::{ConfigError, Error};
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
    /// Bytes of full pages.
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
    /// What is wrong with the configuration; one with codecs, whose messages are other ones.
    ///
    /// # Panics
    /// If `of` names a rank past `ranks`.
    pub fn new(
        config: &CacheConfig,
        ranks: u32,
        filed: &[u32],
        of: impl Fn(u32, u16) -> u32,
    ) -> Result<Schedule, Error> {
        if !config.codecs.is_empty() {
            return Err(ConfigError::Fabric { what: "schedule of packed pages", instead: "no codec" }.into());
        }
        let store = Cache::new(config.clone())?.inner.store;
        let (mut all, mut front) = (vec![RankPlan::default(); ranks as usize], 0);
        for shape in &config.layers {
            let (page, heads) = (shape.layout.bytes(), u64::from(shape.kv_heads));
            // Blocks and pages that a row reads on each rank, and full pages.
            let mut read = vec![(0u64, 0u64, 0u64); ranks as usize];
            for (expert, tokens) in (0u16..).zip(filed) {
                let (full, open) = (tokens / PAGE, u64::from(tokens % PAGE > 0));
                front += open * page * heads;
                for block in 0..full.div_ceil(BLOCK as u32) {
                    let here = u64::from((full - block * BLOCK as u32).min(BLOCK as u32));
                    let fills = if here < BLOCK as u64 { open } else { 0 };
                    let (blocks, pages, whole) = &mut read[of(block, expert) as usize];
                    *blocks += 1;
                    *pages += here + fills;
                    *whole += here;
                }
            }
            front += page * heads * u64::from((store.ring.window() + store.ring.slack()).div_ceil(PAGE) + 1);
            front += page * heads * u64::from(store.sinks.div_ceil(PAGE));
            let sum: u64 = read.iter().map(|(blocks, ..)| blocks).sum();
            for (plan, (blocks, pages, whole)) in all.iter_mut().zip(read) {
                plan.pages += whole * heads;
                plan.bytes += whole * heads * page;
                let share = if sum > 0 { blocks as f64 / sum as f64 } else { 0.0 };
                plan.exact.add(&reads(shape, blocks, pages, sum, false));
                plan.fast.add(&reads(shape, blocks, pages, sum, true));
                let filed = files(shape, share);
                plan.exact.add(&filed);
                plan.fast.add(&filed);
            }
        }
        Ok(Schedule { ranks: all, front })
    }
}

impl Wire {
    fn add(&mut self, other: &Wire) {
        self.sent += other.sent;
        self.received += other.received;
        self.messages += other.messages;
    }
}

/// A layer's questions to a rank, and its answers.
fn reads(shape: &LayerShape, blocks: u64, pages: u64, all: u64, fast: bool) -> Wire {
    if blocks == 0 {
        return Wire::default();
    }
    let (layout, group, heads) = (&shape.layout, u64::from(shape.group()), u64::from(shape.kv_heads));
    let part = Partial::len(group as usize, layout.acc_rows()) as u64;
    // What all ranks answer is cut into waves.
    let waves = (heads * all * part).div_ceil(super::attend::WAVE as u64).clamp(1, heads);
    let asked = 6 + group * (u64::from(layout.k_channels()) + 4) + 1 + blocks + 3 * pages;
    let answered = if fast { part } else { blocks * part };
    let waves = if fast { 1 } else { waves };
    Wire {
        sent: 4.0 * (waves * (AROUND.0 + 1) + heads * asked) as f64,
        received: 4.0 * (waves * AROUND.1 + heads * answered) as f64,
        messages: waves as f64,
    }
}

/// A layer's token on its way: seven of eight pages go token by token, the first of a block whole.
fn files(shape: &LayerShape, share: f64) -> Wire {
    let (layout, heads) = (&shape.layout, f64::from(shape.kv_heads));
    let (blocks, page) = (BLOCK as f64, f64::from(PAGE));
    let token = 5.0 + wire::token_words(layout) as f64;
    let whole = (3.0 + f64::from(layout.words())) / page;
    let kept = 2.0 / page;
    let words = ((blocks - 1.0) * (token + kept) + whole) / blocks;
    Wire {
        sent: 4.0 * share * (heads * words + AROUND.0 as f64 / page),
        received: 4.0 * share * AROUND.1 as f64 / page,
        messages: share / page,
    }
}
