//! Maps from blocks of pages to shards (devices).
//!
//! The paper's map is `id = (t mod N_tok) XOR (e mod N_exp)`, with `e` an expert, folded to `id mod G`. Its `t` is a token,
//! which would move one expert's consecutive tokens from shard to shard; here it counts blocks of an expert's pages. Ids are
//! uniform only if the larger modulus is a multiple of 2^ceil(log2(smaller)); other moduli are rejected.

use core::fmt;

/// A map from (t, expert, KV head) to a shard. `t` is the index of a *block* of pages of one expert, so that a shard
/// holds whole blocks, which are the leaves of the reduction.
///
/// ```
/// # mod pikv { pub use pikv_core::shard; }
/// use pikv::shard::ShardMap;
///
/// let map = ShardMap::xor(8, 8, 4)?;
/// assert_eq!((map.shards(), map.shard(3, 5, 0)), (4, 2));    // (3 XOR 5) mod 4
/// let sum = ShardMap::sum(6)?;                            // (block + expert) mod 6, for any number of shards
/// assert_eq!(sum.shard(3, 5, 0), 2);
/// println!("{}", ShardMap::xor(8, 8, 3).unwrap_err());    // names numbers that work
/// # Ok::<(), pikv_core::shard::ShardError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardMap {
    shards: u32,
    rule: Rule,
}

/// Formula that combines `t`, the expert and the KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rule {
    /// `((t mod tokens) XOR (e mod experts)) mod shards`, arXiv 2508.06526 section 3. `tokens = 1` is pure expert sharding.
    Xor {
        /// N_tok.
        tokens: u32,
        /// N_exp.
        experts: u32,
    },
    /// `(t + e + h) mod shards`, with h the KV head, counted across the layers. Uniform if the number of shards is at most
    /// the sum of an expert's blocks, the experts and the heads; with more shards, some get nothing.
    Sum,
    /// `(t + floor(shards frac(0.7549 e + 0.5698 h))) mod shards`: each expert and KV head begins at a shard of its own, by the
    /// two-dimensional low-discrepancy sequence of the plastic number (M. Roberts, R2), in 32-bit fixed point.
    Spread,
}

/// Why a map cannot be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShardError {
    /// A modulus or the number of shards is 0.
    Zero,
    /// Ids would not be uniform.
    Skewed {
        /// N_tok as given.
        tokens: u32,
        /// N_exp as given.
        experts: u32,
        /// The larger modulus must be a multiple of this.
        multiple: u64,
        /// The next larger accepted value of the larger modulus.
        would_do: u64,
    },
    /// The shards do not divide the range of ids.
    Uneven {
        /// Shards as given.
        shards: u32,
        /// Ids lie in `0..range`.
        range: u32,
        /// The largest accepted number of shards below the given one: it divides the range.
        would_do: u32,
    },
}

impl fmt::Display for ShardError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShardError::Zero => write!(f, "a shard map needs at least 1 shard, and moduli of at least 1"),
            ShardError::Skewed { tokens, experts, multiple, would_do } => write!(
                f,
                "moduli {tokens} and {experts} load the shards unevenly: the larger must be a multiple of \
                 {multiple}, {would_do} would do"
            ),
            ShardError::Uneven { shards, range, would_do } => {
                write!(f, "{shards} shards do not divide the {range} ids of the map: {would_do} would do")
            }
        }
    }
}

impl core::error::Error for ShardError {}

/// The largest divisor of `n` that is at most `most`.
const fn divisor(n: u32, most: u32) -> u32 {
    let (mut best, mut i) = (1, 1);
    while i as u64 * i as u64 <= n as u64 {
        if n.is_multiple_of(i) {
            if i <= most && i > best {
                best = i;
            }
            if n / i <= most && n / i > best {
                best = n / i;
            }
        }
        i += 1;
    }
    best
}

impl ShardMap {
    /// One shard that holds everything.
    pub const ONE: ShardMap = ShardMap { shards: 1, rule: Rule::Sum };

    /// The paper's map onto `shards` shards. The load is even if the number of experts is a multiple of N_exp.
    ///
    /// # Errors
    /// [`ShardError::Zero`] if an argument is 0, [`ShardError::Skewed`] if the ids are not uniform, [`ShardError::Uneven`] if `shards`
    /// does not divide the range of ids.
    pub const fn xor(tokens: u32, experts: u32, shards: u32) -> Result<ShardMap, ShardError> {
        if tokens == 0 || experts == 0 || shards == 0 {
            return Err(ShardError::Zero);
        }
        let (small, large) = if tokens < experts { (tokens, experts) } else { (experts, tokens) };
        let multiple = (small as u64).next_power_of_two();
        if !(large as u64).is_multiple_of(multiple) {
            let would_do = (large as u64).next_multiple_of(multiple);
            return Err(ShardError::Skewed { tokens, experts, multiple, would_do });
        }
        if !large.is_multiple_of(shards) {
            return Err(ShardError::Uneven { shards, range: large, would_do: divisor(large, shards) });
        }
        Ok(ShardMap { shards, rule: Rule::Xor { tokens, experts } })
    }

    /// `(t + e + h) mod shards`, [`Rule::Sum`].
    ///
    /// # Errors
    /// [`ShardError::Zero`] if `shards` is 0.
    pub const fn sum(shards: u32) -> Result<ShardMap, ShardError> {
        if shards == 0 { Err(ShardError::Zero) } else { Ok(ShardMap { shards, rule: Rule::Sum }) }
    }

    /// [`Rule::Spread`], for more shards than [`sum`](ShardMap::sum) loads evenly. For the models of `planner::Geometry`, with even
    /// experts, the fullest shard holds at most 1.1 times the mean with up to 1,024 shards at 131,072 tokens, and at most 1.2 times
    /// with up to 64 shards at 4,096 tokens.
    ///
    /// # Errors
    /// [`ShardError::Zero`] if `shards` is 0.
    pub const fn spread(shards: u32) -> Result<ShardMap, ShardError> {
        if shards == 0 { Err(ShardError::Zero) } else { Ok(ShardMap { shards, rule: Rule::Spread }) }
    }

    /// Number of shards, G.
    pub const fn shards(&self) -> u32 {
        self.shards
    }

    /// Formula of the map.
    pub const fn rule(&self) -> Rule {
        self.rule
    }

    /// Id of block `t` of an expert in a KV head, before it is folded to a shard. `head` is counted across the layers:
    /// `layer * kv_heads + head` if all layers have as many. The paper's map ignores it.
    pub const fn id(&self, t: u64, expert: u32, head: u32) -> u32 {
        let shards = self.shards as u64;
        match self.rule {
            Rule::Xor { tokens, experts } => (t % tokens as u64) as u32 ^ (expert % experts),
            Rule::Sum => ((t % shards + expert as u64 + head as u64) % shards) as u32,
            Rule::Spread => {
                // 2^32 over the plastic number, and over its square.
                let at = expert.wrapping_mul(0xC13F_A9A9).wrapping_add(head.wrapping_mul(0x91E1_0DA5));
                ((t % shards + ((at as u64 * shards) >> 32)) % shards) as u32
            }
        }
    }

    /// Shard of block `t` of an expert in a KV head, with `head` counted as in [`id`](ShardMap::id).
    pub const fn shard(&self, t: u64, expert: u32, head: u32) -> u32 {
        self.id(t, expert, head) % self.shards
    }

    /// Shard of block `t` of a KV head's pages without an expert: sinks and ring.
    pub const fn shared(&self, t: u64, head: u32) -> u32 {
        match self.rule {
            Rule::Xor { .. } | Rule::Sum => {
                ((t % self.shards as u64 + head as u64) % self.shards as u64) as u32
            }
            Rule::Spread => self.shard(t, 0, head),
        }
    }
}
