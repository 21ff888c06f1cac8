//! R_H: hierarchical routing (arXiv 2508.06526, R_H): the group-limited top-k of DeepSeek-V2 (arXiv 2405.04434, 2.2.2) and V3
//! (arXiv 2412.19437).

use super::biased::Terms;
use super::{Biased, RouteError, RouterKind, Shape};
use pikv_core::score::Groups;

/// R_H: splits the experts into groups of consecutive ones, keeps the best groups, and chooses the best experts in them. If a node holds
/// one group, a token's KV is on few nodes. It learns nothing.
///
/// A group's score is the sum of its `best` largest shares of the token's softmax over all experts. Settings that always rank as R_T are
/// refused: all groups kept, or a score of one share with as many groups kept as experts chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hierarchical {
    /// Number of groups; divides the experts, at most 32. Default 4.
    pub groups: u32,
    /// Groups to keep, fewer than `groups`; together they have at least `top_k` experts. Default 2.
    pub kept: u32,
    /// Shares of the softmax in a group's score, the largest ones. Default 2, as in V3; 1 is V2's.
    pub best: u32,
    /// Whether the model follows the ranking. Default false.
    pub model_choice: bool,
}

setters!(Hierarchical { groups: u32, kept: u32, best: u32, model_choice: bool });

impl Default for Hierarchical {
    /// Fits numbers of experts that 4 divides, at least 8, and a `top_k` of at most half of them; [`Hierarchical::fitting`] fits others.
    fn default() -> Self {
        Hierarchical { groups: 4, kept: 2, best: 2, model_choice: false }
    }
}

impl Hierarchical {
    /// The defaults for any number of experts: the most groups, up to 4, that divide the experts and have at least 2 each; half of them
    /// kept, rounded up, or as many as hold `top_k`. [`Hierarchical::router`] refuses the result where no setting changes the ranking:
    /// fewer than 4 experts, a prime number of them, or a `top_k` that needs all groups.
    ///
    /// ```
    /// use pikv_host::router::Hierarchical;
    /// assert_eq!(Hierarchical::fitting(64, 6), Hierarchical::default());
    /// let few = Hierarchical::fitting(6, 2);
    /// assert_eq!((few.groups, few.kept, few.best), (3, 2, 2));
    /// ```
    pub fn fitting(experts: u32, top_k: u32) -> Hierarchical {
        let groups = (1..=4).rev().find(|g| experts.is_multiple_of(*g) && experts / g >= 2).unwrap_or(1);
        let kept = groups.div_ceil(2).max(top_k.div_ceil((experts / groups).max(1)));
        Hierarchical { groups, kept, ..Default::default() }
    }

    /// Builds the router.
    ///
    /// # Errors
    /// An invalid shape, [`RouteError::Groups`], [`RouteError::Kept`], [`RouteError::Best`], or [`RouteError::Idle`] for a setting that
    /// always ranks as [`TopK`](super::TopK).
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let Hierarchical { groups: count, kept, best, model_choice } = self;
        let groups = Some(Groups { count, kept, best });
        Biased::new(RouterKind::Hierarchical, shape, Terms { groups, model_choice, ..Default::default() })
    }
}
