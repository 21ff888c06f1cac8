//! The learnt state of a router, as plain data and as bytes.
//!
//! ```text
//! "PKVR" u16 version, u16 router, u32 experts, u32 loads, u32 misses, u32 entropies, u32 next entropies, u32 counts, u32 arms
//! f32 loads, f32 misses, f32 entropies, f32 next entropies, u64 counts; with arms: u64 rng, u32 arm, and for each arm f64 [6] gram, f64 [3] reward
//! ```
//! Little-endian, without padding.

use super::error::STATE_VERSION;
use super::solve::solve;
use super::{RouterKind, StateError};
use pikv_core::score::MAX_EXPERTS;

const MAGIC: [u8; 4] = *b"PKVR";
const HEADER: usize = 36;

/// The learnt state of a router; fields that its kind does not use are empty.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RouterState {
    /// The router.
    pub router: RouterKind,
    /// Experts of the layer.
    pub experts: u32,
    /// `[experts]` average of an expert's share of the choices, times the number of experts: 1 is balanced.
    pub load: Vec<f32>,
    /// `[experts]` average of the miss rate, or decayed count of missed pages, of an expert.
    pub miss: Vec<f32>,
    /// `[experts]` average over tokens of the gate's binary entropy about an expert, in [0, 1], as the ranking uses it.
    pub entropy: Vec<f32>,
    /// `[experts]` the same including the tokens since the last feedback.
    pub entropy_next: Vec<f32>,
    /// `[experts]` choices since the last feedback.
    pub counts: Vec<u64>,
    /// State of R_A's bandit.
    pub bandit: Option<BanditState>,
}

/// The learnt state of a bandit.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BanditState {
    /// State of the random number generator.
    pub rng: u64,
    /// Index of the arm in use.
    pub arm: u32,
    /// Each arm's statistics.
    pub arms: Vec<ArmState>,
}

/// Discounted sums over the plays of an arm, with x the context.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ArmState {
    /// Lower triangle of the sum of x x^T, row by row.
    pub gram: [f64; 6],
    /// Sum of reward times x.
    pub reward: [f64; 3],
}

impl RouterState {
    /// The state of a router that learns nothing: all lists are empty. A router of your own sets those that it has; each is empty or
    /// `[experts]`, with values in the range of its field.
    pub fn new(router: RouterKind, experts: u32) -> RouterState {
        let none = Vec::new;
        let (load, miss, entropy, entropy_next) = (none(), none(), none(), none());
        RouterState { router, experts, load, miss, entropy, entropy_next, counts: vec![], bandit: None }
    }

    /// The state as bytes for [`RouterState::from_bytes`], the same on every machine.
    pub fn to_bytes(&self) -> Vec<u8> {
        let arms = self.bandit.as_ref().map_or(&[][..], |b| &b.arms);
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(STATE_VERSION.to_le_bytes());
        out.extend(number(self.router).to_le_bytes());
        let averages = [&self.load, &self.miss, &self.entropy, &self.entropy_next];
        let [loads, misses, entropies, next] = averages.map(Vec::len);
        for n in [self.experts as usize, loads, misses, entropies, next, self.counts.len(), arms.len()] {
            out.extend((n as u32).to_le_bytes());
        }
        for x in averages.into_iter().flatten() {
            out.extend(x.to_le_bytes());
        }
        for n in &self.counts {
            out.extend(n.to_le_bytes());
        }
        if let Some(bandit) = &self.bandit {
            out.extend(bandit.rng.to_le_bytes());
            out.extend(bandit.arm.to_le_bytes());
            for x in arms.iter().flat_map(|a| a.gram.iter().chain(&a.reward)) {
                out.extend(x.to_le_bytes());
            }
        }
        out
    }

    /// Reads the output of [`RouterState::to_bytes`].
    ///
    /// # Errors
    /// Bytes of another kind, version or length, or values that no router reaches.
    pub fn from_bytes(bytes: &[u8]) -> Result<RouterState, StateError> {
        let got = bytes.len() as u64;
        if bytes.len() < HEADER {
            let is_one = bytes.get(..4).is_none_or(|m| m == MAGIC);
            return Err(if is_one {
                StateError::Bytes { got, expected: HEADER as u64 }
            } else {
                StateError::Magic
            });
        }
        let mut from = Reader(bytes);
        if from.take() != MAGIC {
            return Err(StateError::Magic);
        }
        let version = u16::from_le_bytes(from.take());
        if version != STATE_VERSION {
            return Err(StateError::Version(version));
        }
        let kind = u16::from_le_bytes(from.take());
        let router = kind_of(kind).ok_or(StateError::Kind(kind))?;
        let [experts, loads, misses, entropies, next, counts, arms] = std::array::from_fn(|_| from.u32());
        let bandit = if arms == 0 { 0 } else { 12 + 72 * u64::from(arms) };
        let averages: u64 = [loads, misses, entropies, next].map(u64::from).iter().sum();
        let expected = HEADER as u64 + 4 * averages + 8 * u64::from(counts) + bandit;
        if got != expected {
            return Err(StateError::Bytes { got, expected });
        }
        let [load, miss, entropy, entropy_next] = [loads, misses, entropies, next]
            .map(|n| (0..n).map(|_| f32::from_le_bytes(from.take())).collect());
        let counts = (0..counts).map(|_| u64::from_le_bytes(from.take())).collect();
        let bandit = (arms > 0).then(|| {
            let (rng, arm) = (u64::from_le_bytes(from.take()), from.u32());
            let mut next = || f64::from_le_bytes(from.take());
            let arms = (0..arms).map(|_| ArmState {
                gram: std::array::from_fn(|_| next()),
                reward: std::array::from_fn(|_| next()),
            });
            BanditState { rng, arm, arms: arms.collect() }
        });
        let state = RouterState { router, experts, load, miss, entropy, entropy_next, counts, bandit };
        state.check()?;
        Ok(state)
    }

    /// Refuses values that no router reaches.
    pub(crate) fn check(&self) -> Result<(), StateError> {
        let experts = self.experts as usize;
        if !(1..=MAX_EXPERTS).contains(&experts) {
            return Err(StateError::Value { what: "experts", index: 0, value: experts as f64 });
        }
        let lengths = [
            ("loads", self.load.len()),
            ("misses", self.miss.len()),
            ("entropies", self.entropy.len()),
            ("next entropies", self.entropy_next.len()),
            ("counts", self.counts.len()),
        ];
        for (what, got) in lengths {
            if got != 0 && got != experts {
                return Err(StateError::Shape { what, got, expected: experts });
            }
        }
        // Rounding may put an average slightly above the number of experts, as with one expert that gets every choice.
        let most = 1.001 * experts as f32;
        check("load", &self.load, most)?;
        // The largest decayed count of u32 is 2^32 / (1 - decay), with a decay of at most 1 - 2^-24.
        check("miss", &self.miss, 72_057_594_037_927_936.0)?;
        check("entropy", &self.entropy, 1.0)?;
        check("next entropy", &self.entropy_next, 1.0)?;
        // Keeps their sum from overflowing.
        if let Some(index) = self.counts.iter().position(|n| n >> 48 != 0) {
            return Err(StateError::Value { what: "count", index, value: self.counts[index] as f64 });
        }
        let Some(bandit) = &self.bandit else { return Ok(()) };
        if bandit.arm as usize >= bandit.arms.len() {
            return Err(StateError::Value { what: "arm in use", index: 0, value: bandit.arm.into() });
        }
        for (index, arm) in bandit.arms.iter().enumerate() {
            if let Some(value) = arm.gram.iter().chain(&arm.reward).find(|x| !x.is_finite()) {
                return Err(StateError::Value { what: "sum of arm", index, value: *value });
            }
            if solve(&arm.gram, [1.0; 3]).is_none() {
                return Err(StateError::Value { what: "gram matrix of arm", index, value: arm.gram[0] });
            }
        }
        Ok(())
    }

    /// Checks that this is a state that a router with the state `expected` may restore: of its kind, with lists as long, and with values
    /// that a router reaches. A router of your own calls it in [`Router::restore`](super::Router::restore).
    ///
    /// # Errors
    /// [`StateError::Router`], [`StateError::Shape`] or [`StateError::Value`].
    pub fn check_as(&self, expected: &RouterState) -> Result<(), StateError> {
        if self.router != expected.router {
            return Err(StateError::Router { got: self.router, expected: expected.router });
        }
        let arms = |s: &RouterState| s.bandit.as_ref().map_or(0, |b| b.arms.len());
        let shapes = [
            ("experts", self.experts as usize, expected.experts as usize),
            ("loads", self.load.len(), expected.load.len()),
            ("misses", self.miss.len(), expected.miss.len()),
            ("entropies", self.entropy.len(), expected.entropy.len()),
            ("next entropies", self.entropy_next.len(), expected.entropy_next.len()),
            ("counts", self.counts.len(), expected.counts.len()),
            ("arms", arms(self), arms(expected)),
        ];
        for (what, got, expected) in shapes {
            if got != expected {
                return Err(StateError::Shape { what, got, expected });
            }
        }
        self.check()
    }
}

/// First number of the custom kinds.
const CUSTOM: u16 = 0x100;

/// The number of a kind in saved states: its index in [`RouterKind::ALL`], or [`CUSTOM`] and the number of a router of the user's.
fn number(kind: RouterKind) -> u16 {
    match kind {
        RouterKind::Hash => 0,
        RouterKind::TopK => 1,
        RouterKind::LoadBalanced => 2,
        RouterKind::CacheAware => 3,
        RouterKind::Entropy => 4,
        RouterKind::Adaptive => 5,
        RouterKind::Hierarchical => 6,
        RouterKind::Custom(own) => CUSTOM + u16::from(own),
    }
}

/// The kind with this [`number`].
fn kind_of(number: u16) -> Option<RouterKind> {
    match number.checked_sub(CUSTOM) {
        None => RouterKind::ALL.get(usize::from(number)).copied(),
        Some(own) => u8::try_from(own).ok().map(RouterKind::Custom),
    }
}

/// Checks that all of `values` are numbers from 0 to `most`.
fn check(what: &'static str, values: &[f32], most: f32) -> Result<(), StateError> {
    match values.iter().position(|x| !(0.0..=most).contains(x)) {
        Some(index) => Err(StateError::Value { what, index, value: values[index].into() }),
        None => Ok(()),
    }
}

/// Bytes of a checked length.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk().expect("the length was checked");
        self.0 = rest;
        *head
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
}
