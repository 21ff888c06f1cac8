//! R_H: hierarchical routing (arXiv 2508.06526, R_H), as the group-limited top-k of DeepSeek-V2 (arXiv 2405.04434, 2.2.2) and V3
//! (arXiv 2412.19437).

use super::biased::Terms;
use super::{Biased, RouteError, RouterKind, Shape};
use pikv_core::score::Groups;

/// R_H: the experts in groups of consecutive ones, the best groups kept, the best experts in them chosen. So a token's KV is
/// on few nodes, if a group is what a node holds. It learns nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hierarchical {
    /// Groups: they divide the experts, at most 32. Default 4.
    pub groups: u32,
    /// Groups that are kept; they must hold `top_k` experts. Default 2.
    pub kept: u32,
    /// A group's score is the sum of so many of its largest logits. Default 1, as V2; 2 is V3's.
    pub best: u32,
    /// The model follows the ranking. Default false.
    pub model_choice: bool,
}

impl Default for Hierarchical {
    fn default() -> Self {
        Hierarchical { groups: 4, kept: 2, best: 1, model_choice: false }
    }
}

impl Hierarchical {
    /// The router.
    ///
    /// # Errors
    /// A shape that is none, groups that do not divide the experts, groups kept that are not there or do not hold the experts
    /// of a token, or more scores a group than experts.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let Hierarchical { groups: count, kept, best, model_choice } = self;
        let groups = Some(Groups { count, kept, best });
        Biased::new(RouterKind::Hierarchical, shape, Terms { groups, model_choice, ..Default::default() })
    }
}
