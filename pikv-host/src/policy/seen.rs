//! Attention of pages and heads, as policies observe it.

use crate::base::frequencies::Frequencies;
use crate::base::ids::PageId;
use crate::codec::HeadCodec;
use crate::policy::page::TokenPage;
use pikv_core::page::Position;
use pikv_core::warp::LANES;

/// Attention of some rows over one page.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Seen<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// Index of the KV head.
    pub kv_head: usize,
    /// Query heads of the KV head.
    pub group: u32,
    /// Position of the first row.
    pub first: Position,
    /// Number of rows.
    pub rows: u32,
    /// Present id of the page.
    pub page: PageId,
    /// Bit `t` is set if the token at lane `t` is held.
    pub live: u32,
    /// The positions of its tokens.
    pub positions: Positions<'a>,
    /// Softmax weight of each lane, summed over the rows and the group; 0 for a lane that is not held.
    pub mass: &'a [f32; LANES],
    /// Tokens that the head holds.
    pub resident: u32,
}

/// Positions of a page's tokens in their sequence. They are read from the page only on request, which is faster for policies that do not
/// need them.
#[derive(Clone, Copy, Debug)]
pub struct Positions<'a>(At<'a>);

#[derive(Clone, Copy, Debug)]
enum At<'a> {
    List(&'a [u32; LANES]),
    First(u32),
    Page(&'a dyn TokenPage, Option<&'a HeadCodec>),
}

impl<'a> Positions<'a> {
    /// The given positions, a lane each; for tests of a policy.
    pub fn new(positions: &'a [u32; LANES]) -> Positions<'a> {
        Positions(At::List(positions))
    }

    /// Consecutive positions from `first`.
    pub(crate) fn first(first: u32) -> Positions<'a> {
        Positions(At::First(first))
    }

    /// The positions of a page of a run.
    pub(crate) fn page(page: &'a dyn TokenPage, codec: Option<&'a HeadCodec>) -> Positions<'a> {
        Positions(At::Page(page, codec))
    }

    /// The position of the token at `lane`; unspecified for a lane without a token.
    pub fn get(&self, lane: usize) -> u32 {
        match self.0 {
            At::List(positions) => positions[lane],
            At::First(first) => first + lane as u32,
            At::Page(page, codec) => page.position(codec, lane as u32).unwrap_or_default(),
        }
    }
}

/// A bit for each lane.
const BITS: [u32; LANES] = {
    let mut bits = [1; LANES];
    let mut lane = 0;
    while lane < LANES {
        bits[lane] <<= lane;
        lane += 1;
    }
    bits
};

impl Seen<'_> {
    /// The lanes of tokens that are held.
    pub fn lanes(&self) -> impl Iterator<Item = usize> + use<> {
        let mut rest = self.live;
        std::iter::from_fn(move || {
            let lane = (rest != 0).then_some(rest.trailing_zeros() as usize);
            rest &= rest.wrapping_sub(1);
            lane
        })
    }

    /// The position of the token at `lane`; unspecified for a lane that is not held.
    pub fn position(&self, lane: usize) -> u32 {
        self.positions.get(lane)
    }

    /// Number of rows at or after `position`.
    pub fn rows_after(&self, position: u32) -> u32 {
        (self.first.0 + self.rows).saturating_sub(position.max(self.first.0))
    }

    /// Number of rows at or after the token at `lane`, which must be held. A single row is after all tokens of the page, so its case
    /// reads no positions.
    pub fn rows_of(&self, lane: usize) -> u32 {
        if self.rows == 1 { 1 } else { self.rows_after(self.position(lane)) }
    }

    /// Replaces each held token's state by `f(state, mass)`.
    ///
    /// `f` may also be called for lanes that are not held; the result is dropped.
    #[inline]
    pub fn update(&self, kept: &mut [f32; LANES], f: impl Fn(f32, f32) -> f32) {
        if self.live == u32::MAX {
            // The most frequent case: no lane is masked, so this compiles to few vector instructions.
            kept.iter_mut().zip(self.mass).for_each(|(kept, mass)| *kept = f(*kept, *mass));
            return;
        }
        for ((kept, mass), held) in kept.iter_mut().zip(self.mass).zip(self.held()) {
            let new = f(*kept, *mass).to_bits();
            *kept = f32::from_bits(new & held | kept.to_bits() & !held);
        }
    }

    /// Adds its mass to the state of each held token.
    #[inline]
    pub fn add(&self, kept: &mut [f32; LANES]) {
        // Lanes that are not held have a mass of 0, so no lane is masked.
        kept.iter_mut().zip(self.mass).for_each(|(kept, mass)| *kept += mass);
    }

    /// Softmax weight of all tokens. Summed by halves, lane by lane, in an order that does not depend on the lanes held.
    #[inline]
    pub fn weight(&self) -> f32 {
        let sixteen: [f32; 16] = halves(self.mass);
        let eight: [f32; 8] = halves(&sixteen);
        let four: [f32; 4] = halves(&eight);
        let two: [f32; 2] = halves(&four);
        two[0] + two[1]
    }

    /// All bits set for each lane that is held, none for the others.
    fn held(&self) -> [u32; LANES] {
        BITS.map(|bit| if self.live & bit == bit { u32::MAX } else { 0 })
    }

    /// Whether the rows used the page: they gave it a mass above 0 and at least `share` times that of an equal spread over all tokens.
    pub fn used(&self, share: f32) -> bool {
        let mass = self.weight();
        let all = (self.rows * self.group) as f32;
        let fair = all * self.live.count_ones() as f32 / self.resident as f32;
        mass > 0.0 && mass >= share * fair
    }
}

fn halves<const N: usize>(x: &[f32]) -> [f32; N] {
    let mut sums = [0.0; N];
    for ((sum, a), b) in sums.iter_mut().zip(&x[..N]).zip(&x[N..2 * N]) {
        *sum = a + b;
    }
    sums
}

/// Attention of some rows over one KV head.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HeadSeen<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// Index of the KV head.
    pub kv_head: usize,
    /// Query heads of the KV head.
    pub group: u32,
    /// Position of the first row.
    pub first: Position,
    /// Number of rows.
    pub rows: u32,
    /// Their queries, `[rows][group][k_dim]`, as given to attention; empty unless the policy keeps state of heads.
    pub queries: &'a [f32],
    /// Pages that the rows wanted and that lay in the first tier ([`Hits`](crate::rules::Hits)), summed over the rows. A page that lost
    /// tokens counts by the share that it holds, so the unit is a page and the resolution 1/32. 0 unless the policy
    /// [wants hits](super::Policy::wants_hits).
    pub hits: f32,
    /// Pages that the rows wanted and that were evicted or lay in another tier, and the missing shares of the others; in the same unit.
    pub misses: f32,
    /// Rows whose wanted pages were counted and that wanted at least one.
    pub asked: u32,
    /// Frequencies of the layer's rotation, if it is scaled ([`CacheConfig::frequencies`](crate::CacheConfig::frequencies)).
    pub frequencies: Option<&'a Frequencies>,
}
