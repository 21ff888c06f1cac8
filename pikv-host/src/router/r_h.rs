//! R_H: hierarchical routing (arXiv 2508.06526, R_H), as the group-limited top-k of DeepSeek-V2 (arXiv 2405.04434, 2.2.2) and V3
//! (arXiv 2412.19437).

use super::biased::Terms;
use super::{Biased, RouteError, RouterKind, Shape};
use pikv_core::score::Groups;

/// R_H: the experts in groups of consecutive ones, the best groups kept, the best experts in them chosen. So a token's KV is
/// on few nodes, if a group is what a node holds. It learns nothing.
///
/// A group's score is the sum of its `best` largest shares of the token's softmax over all experts. A setting that ranks as R_T does,
/// whatever the logits, is refused: all groups kept, or a score of one share with as many groups kept as experts chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hierarchical {
    /// Groups: they divide the experts, at most 32. Default 4.
    pub groups: u32,
    /// Groups that are kept, fewer than there are; they must hold `top_k` experts. Default 2.
    pub kept: u32,
    /// A group's score is the sum of so many of its largest shares of the softmax. Default 2, as V3; 1 is V2's.
    pub best: u32,
    /// The model follows the ranking. Default false.
    pub model_choice: bool,
}

setters!(Hierarchical { groups: u32, kept: u32, best: u32, model_choice: bool });

impl Default for Hierarchical {
    /// For experts that 4 divides, at least 8 of them, and a `top_k` of at most half of them; [`Hierarchical::fitting`] is for all.
    fn default() -> Self {
        Hierarchical { groups: 4, kept: 2, best: 2, model_choice: false }
    }
}

impl Hierarchical {
    /// The defaults for any number of experts: the most groups of at least 2 experts that divide them, up to 4; half of them kept,
    /// rounded up, or as many as hold `top_k`. [`Hierarchical::router`] refuses them where no setting acts: fewer than 4 experts, a
    /// prime number of them, or a `top_k` that takes all groups.
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

    /// The router.
    ///
    /// # Errors
    /// A shape that is none, groups that do not divide the experts, groups kept that are not there or do not hold the experts
    /// of a token, more shares in a group's score than it has experts, or a setting that always ranks as [`TopK`](super::TopK).
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let Hierarchical { groups: count, kept, best, model_choice } = self;
        let groups = Some(Groups { count, kept, best });
        Biased::new(RouterKind::Hierarchical, shape, Terms { groups, model_choice, ..Default::default() })
    }
}
