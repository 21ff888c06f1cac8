//! What a policy is told of pages and heads.

use crate::base::frequencies::Frequencies;
use crate::base::ids::PageId;
use crate::codec::HeadCodec;
use crate::policy::page::TokenPage;
use pikv_core::page::Position;
use pikv_core::warp::LANES;

/// What some rows of attention saw of a page.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Seen<'a> {
    /// The layer.
    pub layer: usize,
    /// The KV head.
    pub kv_head: usize,
    /// Query heads of the KV head.
    pub group: u32,
    /// Position of the first of the rows.
    pub first: Position,
    /// How many rows.
    pub rows: u32,
    /// The page, where it is now.
    pub page: PageId,
    /// Bit `t` is set if the token at lane `t` is held.
    pub live: u32,
    /// The positions of its tokens.
    pub positions: Positions<'a>,
    /// Softmax weight of each lane, summed over the rows and the group; 0 of a lane that is not held.
    pub mass: &'a [f32; LANES],
    /// Tokens that the head holds.
    pub resident: u32,
}

/// Where the tokens of a page stand in their sequence. They lie with the page, of which nothing is read before they are asked for:
/// a policy that does without them is told faster.
#[derive(Clone, Copy, Debug)]
pub struct Positions<'a>(At<'a>);

#[derive(Clone, Copy, Debug)]
enum At<'a> {
    List(&'a [u32; LANES]),
    First(u32),
    Page(&'a dyn TokenPage, Option<&'a HeadCodec>),
}

impl<'a> Positions<'a> {
    /// That of each lane, as a policy's own tests have them.
    pub fn new(positions: &'a [u32; LANES]) -> Positions<'a> {
        Positions(At::List(positions))
    }

    /// One after the other.
    pub(crate) fn first(first: u32) -> Positions<'a> {
        Positions(At::First(first))
    }

    /// Those of a page of a run.
    pub(crate) fn page(page: &'a dyn TokenPage, codec: Option<&'a HeadCodec>) -> Positions<'a> {
        Positions(At::Page(page, codec))
    }

    /// The position of the token at `lane`; of a lane without one, any.
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
    /// The lanes that are held.
    pub fn lanes(&self) -> impl Iterator<Item = usize> + use<> {
        let mut rest = self.live;
        std::iter::from_fn(move || {
            let lane = (rest != 0).then_some(rest.trailing_zeros() as usize);
            rest &= rest.wrapping_sub(1);
            lane
        })
    }

    /// The position of the token at `lane`; of a lane that is not held, any.
    pub fn position(&self, lane: usize) -> u32 {
        self.positions.get(lane)
    }

    /// How many of the rows are at or after `position`.
    pub fn rows_after(&self, position: u32) -> u32 {
        (self.first.0 + self.rows).saturating_sub(position.max(self.first.0))
    }

    /// How many of the rows are at or after the token at `lane`, which is held. A single row is after all of them, so that
    /// positions are not asked for.
    pub fn rows_of(&self, lane: usize) -> u32 {
        if self.rows == 1 { 1 } else { self.rows_after(self.position(lane)) }
    }

    /// Has `f` make of what is kept of each token that is held, and of its mass, what is kept from now on.
    ///
    /// It may be called for lanes that are not held as well; what it returns for them is dropped.
    #[inline]
    pub fn update(&self, kept: &mut [f32; LANES], f: impl Fn(f32, f32) -> f32) {
        if self.live == u32::MAX {
            // Most pages: nothing to be picked out, so that this is a few instructions of many lanes each.
            kept.iter_mut().zip(self.mass).for_each(|(kept, mass)| *kept = f(*kept, *mass));
            return;
        }
        for ((kept, mass), held) in kept.iter_mut().zip(self.mass).zip(self.held()) {
            let new = f(*kept, *mass).to_bits();
            *kept = f32::from_bits(new & held | kept.to_bits() & !held);
        }
    }

    /// Adds its mass to what is kept of each token that is held.
    #[inline]
    pub fn add(&self, kept: &mut [f32; LANES]) {
        // To the others 0 is added: nothing has to be picked out.
        kept.iter_mut().zip(self.mass).for_each(|(kept, mass)| *kept += mass);
    }

    /// Softmax weight of all tokens. Halves are added lane by lane until one is left, whatever is held.
    #[inline]
    pub fn weight(&self) -> f32 {
        let sixteen: [f32; 16] = halves(self.mass);
        let eight: [f32; 8] = halves(&sixteen);
        let four: [f32; 4] = halves(&eight);
        let two: [f32; 2] = halves(&four);
        two[0] + two[1]
    }

    /// All bits of each lane that is held, none of the others.
    fn held(&self) -> [u32; LANES] {
        BITS.map(|bit| if self.live & bit == bit { u32::MAX } else { 0 })
    }

    /// Whether the rows used the page: whether they gave it at least `share` of what an equal spread over all tokens would, and
    /// more than nothing.
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

/// What some rows of attention saw of a head.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HeadSeen<'a> {
    /// The layer.
    pub layer: usize,
    /// The KV head.
    pub kv_head: usize,
    /// Query heads of the KV head.
    pub group: u32,
    /// Position of the first of the rows.
    pub first: Position,
    /// How many rows.
    pub rows: u32,
    /// Their queries, `[rows][group][k_dim]`, as given to attention; empty unless something is kept of heads.
    pub queries: &'a [f32],
    /// Pages that the rows wanted and found in the first tier, in 32nds of a page ([`Hits`](crate::rules::Hits)). 0 unless somebody
    /// [asks](super::Policy::wants_hits).
    pub hits: f32,
    /// Pages that they wanted and that were gone, or lay elsewhere.
    pub misses: f32,
    /// Rows among them whose wanted pages were looked for, and that wanted some.
    pub asked: u32,
    /// Frequencies of the layer's rotation, if it is scaled ([`CacheConfig::frequencies`](crate::CacheConfig::frequencies)).
    pub frequencies: Option<&'a Frequencies>,
}
