//! The eviction rule of a layer, with the policy's properties read when the cache was built.

use crate::base::error::ConfigError;
use crate::base::frequencies::Frequencies;
use crate::policy::state::TokenStates;
use crate::policy::{Eviction, MassFeedback, Scope, Seen, Token};
use pikv_core::page::PAGE;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::ops::Range;

/// Most tokens that can be rolled back with a policy that keeps state of tokens or heads: the state is stored once for each length that a
/// rollback can restore.
const ROLLBACK: u32 = 1024;

/// Most bytes of state of a page and of a head together, over all lengths that a rollback can restore.
const MOST_KEPT: usize = 1 << 30;

/// The eviction rule of a layer.
#[derive(Debug)]
pub(crate) struct Rule {
    pub layer: usize,
    pub eviction: Eviction,
    /// f32 of state for each token, and for each head.
    pub words: usize,
    pub head_words: usize,
    /// Lengths of a sequence that a rollback can restore, including the present one.
    pub versions: usize,
    /// Properties of the policy, read once when the cache was built.
    pub name: String,
    pub scope: Scope,
    pub feedback: MassFeedback,
    pub oldest_first: bool,
    pub reads_tokens: bool,
    pub wants_hits: bool,
    /// Frequencies of the layer's rotation, if they are scaled.
    pub frequencies: Option<Frequencies>,
}

impl Rule {
    pub fn new(
        layer: usize,
        shape: &LayerShape,
        eviction: &Eviction,
        rollback: u32,
    ) -> Result<Rule, ConfigError> {
        eviction.budget.check(layer, shape.kv_heads)?;
        let refuse = |why: String| ConfigError::TokenBudget { layer, why };
        if eviction.batch == Some(0) {
            return Err(refuse("Eviction::batch(0): it must be at least 1".to_owned()));
        }
        if let Some(floor) = eviction.adaptive.filter(|floor| !(0.0..=1.0).contains(floor)) {
            return Err(refuse(format!(
                "Eviction::adaptive({floor}): the floor of a head's share must be in 0..=1"
            )));
        }
        if eviction.adaptive.is_some() && eviction.by_page {
            let why =
                "Eviction::adaptive with by_page: heads can share budgets by tokens, not by whole pages";
            return Err(refuse(why.to_owned()));
        }
        let policy = &eviction.policy;
        let invalid = |option| ConfigError::PolicyOption { layer, policy: policy.name().to_owned(), option };
        policy.check().map_err(invalid)?;
        let (words, k_dim) = (policy.words(), shape.layout.k_dim as usize);
        let head_words = policy.head_words(k_dim, shape.group() as usize);
        if words + head_words > 0 && rollback > ROLLBACK {
            let policy = policy.name().to_owned();
            return Err(ConfigError::PolicyRollback { layer, policy, rollback, limit: ROLLBACK });
        }
        let versions = rollback as usize + 1;
        let of_page = words.checked_mul(LANES).and_then(|words| words.checked_add(head_words));
        if of_page.and_then(|words| words.checked_mul(4 * versions)).is_none_or(|bytes| bytes > MOST_KEPT) {
            return Err(refuse(format!(
                "its policy keeps {words} words a token and {head_words} a head, for each of {versions} lengths that can be gone back to; \
                 a page's and a head's must be at most 1 GiB"
            )));
        }
        Ok(Rule {
            layer,
            words,
            head_words,
            versions,
            name: policy.name().to_owned(),
            scope: policy.scope(),
            feedback: policy.feedback(),
            oldest_first: policy.oldest_first(),
            reads_tokens: policy.reads_tokens(),
            wants_hits: policy.wants_hits(),
            frequencies: None,
            eviction: eviction.clone(),
        })
    }

    /// Whether the policy keeps state of tokens or heads; if not, it observes nothing.
    pub fn keeps(&self) -> bool {
        self.words > 0 || self.head_words > 0
    }

    /// The state of a run without pages.
    pub fn kept(&self) -> TokenStates {
        TokenStates::new(self.words, self.versions)
    }

    /// The version for a sequence of `len` tokens.
    pub fn version(&self, len: u32) -> usize {
        len as usize % self.versions
    }

    /// The rows of a step from `old` to `new` tokens, in the groups in which the policy observes them: each row that can be rolled back
    /// is a group. Beside each group the rows whose mass it needs; a single row always, because a rollback may make it the last.
    pub fn cuts(&self, old: u32, new: u32) -> impl Iterator<Item = (Range<u32>, Range<u32>)> + use<> {
        let single = new - (self.versions as u32 - 1).min(new - old);
        let (from, told) = match self.feedback {
            MassFeedback::None => (single, false),
            MassFeedback::All => (old, true),
            MassFeedback::LastRows(rows) => (new.saturating_sub(rows), true),
        };
        let many = old..single;
        let first = (!many.is_empty()).then(|| (many, from.clamp(old, single)..single));
        first.into_iter().chain((single..new).map(move |row| {
            let start = if told { row } else { row + 1 };
            (row..row + 1, start..row + 1)
        }))
    }

    /// Calls the policy's `observe` for a page.
    pub fn observe(&self, seen: &Seen<'_>, rows: &mut [[f32; LANES]]) {
        let nothing = |(lane, mass): (usize, &f32)| seen.live >> lane & 1 != 0 || mass.to_bits() == 0;
        debug_assert!(seen.mass.iter().enumerate().all(nothing), "{seen:?}");
        self.eviction.policy.observe(seen, rows);
    }

    /// Writes the initial state of a new token to its lane of tile `tile`.
    pub fn born(&self, token: &Token<'_>, kept: &mut TokenStates, tile: usize) {
        let mut words: SmallVec<[f32; 8]> = SmallVec::from_elem(0.0, self.words);
        self.eviction.policy.born(token, &mut words);
        kept.set(tile, token.position.0 % PAGE, &words);
    }
}
