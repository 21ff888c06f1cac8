//! Which runs of pages a layer files tokens in, where experts share them.
//!
//! Each run has one page that is not full. With a run for each of 256 experts, these pages would take 8 times the bytes of 1,024
//! tokens. So a token with home expert `e` is filed in run `e % runs`, and the number of runs grows with the token's position. The
//! place of a token depends on its position and its expert only, and it is never moved to another run.

use crate::config::shape::CacheShape;
use pikv_core::page::PAGE;
use pikv_core::plan::{LayerShape, StoreShape};
use smallvec::SmallVec;

/// Runs that a layer may have from its first token on. A model with at most so many experts has a run for each.
pub(crate) const FEW: u32 = 8;
/// Tokens for each further run. The pages that are not full then have less than a quarter of the tokens' lanes free.
const TOKENS: u32 = 4 * PAGE;

/// The rule by which a layer of a sequence files tokens in runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharing {
    experts: u32,
    window: Option<u32>,
    /// Tokens before this position are in runs of their own experts: versions of pikv whose experts did not share runs filed them.
    own_until: u32,
}

impl Sharing {
    /// Number of runs, without that of the sinks, in which tokens at `position` are filed: the number of experts, halved until it is at
    /// most [`FEW`], or at most one for each [`TOKENS`] tokens that the layer can hold there.
    pub fn runs(self, position: u32) -> u32 {
        let held = self.window.map_or(position, |window| window.min(position));
        let most = if position < self.own_until { u32::MAX } else { FEW.max(held / TOKENS) };
        let mut runs = self.experts;
        while runs > most {
            runs /= 2;
        }
        runs
    }

    /// The first position after `position` at which there can be more runs.
    pub fn next_change(self, position: u32) -> u32 {
        if position < self.own_until {
            return self.own_until;
        }
        let runs = self.runs(position);
        let mut more = self.experts;
        while more / 2 > runs {
            more /= 2;
        }
        let next = if more > runs { more.saturating_mul(TOKENS) } else { u32::MAX };
        if self.window.is_some_and(|window| window < next) { u32::MAX } else { next }
    }

    /// The run, from 0, of a token with home expert `home` at `position`.
    pub fn run(self, home: u16, position: u32) -> u16 {
        (u32::from(home) % self.runs(position)) as u16
    }

    /// The most runs, without that of the sinks, in which tokens at positions `from..until` are filed.
    pub fn most(self, from: u32, until: u32) -> u32 {
        self.runs(from).max(self.runs(until))
    }

    /// The runs with tokens of home expert `home` at positions `first..=last`.
    pub fn runs_of(self, home: u16, first: u32, last: u32) -> SmallVec<[u16; 8]> {
        let mut all = SmallVec::new();
        let mut add = |runs: u32| {
            let run = (u32::from(home) % runs) as u16;
            if !all.contains(&run) {
                all.push(run);
            }
        };
        if first < self.own_until {
            add(self.experts);
        }
        if last >= self.own_until {
            let (mut runs, least) = (self.runs(last), self.runs(first.max(self.own_until)));
            add(runs);
            while runs > least {
                runs /= 2;
                add(runs);
            }
        }
        all
    }
}

impl CacheShape {
    /// The runs of a layer whose tokens before `own_until` are in runs of their own experts.
    pub fn sharing(&self, shape: &LayerShape, own_until: u32) -> Sharing {
        Sharing { experts: self.config.experts, window: shape.window, own_until }
    }

    /// The store of a layer with the number of runs that it can have at `len` tokens in place of its experts.
    pub fn store_at(&self, layer: usize, len: u32) -> StoreShape {
        let store = self.stores[layer];
        let runs = self.sharing(&self.config.layers[layer], 0).runs(store.ring.left(len));
        StoreShape::new(store.ring, store.sinks, runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sharing(experts: u32, window: Option<u32>) -> Sharing {
        Sharing { experts, window, own_until: 0 }
    }

    #[test]
    fn few_experts_share_nothing() {
        for experts in 1..=FEW {
            for position in [0, 1, 31, 100, 5000, u32::MAX / 2] {
                assert_eq!(sharing(experts, None).runs(position), experts);
                assert_eq!(sharing(experts, Some(1)).runs(position), experts);
            }
        }
    }

    #[test]
    fn runs_grow_with_the_tokens_that_are_held() {
        let runs = |experts, window, positions: &[u32]| -> Vec<u32> {
            positions.iter().map(|position| sharing(experts, window).runs(*position)).collect()
        };
        assert_eq!(runs(256, None, &[0, 2047, 2048, 4096, 32767, 32768]), [8, 8, 16, 32, 128, 256]);
        assert_eq!(runs(256, Some(4100), &[0, 2048, 4096, 1 << 30]), [8, 16, 32, 32]);
        assert_eq!(runs(9, None, &[0, 1151, 1152, 1 << 30]), [4, 4, 9, 9]);
        assert_eq!(runs(160, None, &[1279, 1280, 2560, 20480]), [5, 10, 20, 160]);
    }

    #[test]
    fn runs_change_where_it_is_said() {
        let own = Sharing { own_until: 2000, ..sharing(64, None) };
        let shared = [(1, None), (9, None), (46, None), (160, Some(3000)), (256, None)];
        for sharing in shared.map(|(experts, window)| sharing(experts, window)).into_iter().chain([own]) {
            let mut next = 0;
            for position in 0..40_000 {
                if position == next {
                    next = sharing.next_change(position);
                } else {
                    assert_eq!(
                        sharing.runs(position),
                        sharing.runs(position - 1),
                        "{sharing:?} at {position}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_runs_of_an_expert_are_those_of_its_tokens() {
        let own = Sharing { own_until: 2000, ..sharing(64, None) };
        let shared = [(9, None), (46, None), (160, Some(3000)), (256, None)];
        for sharing in shared.map(|(experts, window)| sharing(experts, window)).into_iter().chain([own]) {
            let experts = sharing.experts;
            for expert in (0..experts).step_by(7) {
                for (first, last) in [(0, 0), (1100, 1300), (0, 40_000), (2047, 2048), (9000, 40_000)] {
                    let mut of: Vec<u16> = (first..=last).map(|p| sharing.run(expert as u16, p)).collect();
                    of.sort_unstable();
                    of.dedup();
                    let mut runs = sharing.runs_of(expert as u16, first, last).to_vec();
                    runs.sort_unstable();
                    assert_eq!(runs, of, "expert {expert} of {experts} at {first}..={last}");
                }
            }
        }
    }
}
