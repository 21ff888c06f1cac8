//! Softmax weights and hits of one KV head, for the layer's policy and the router.

use crate::attend::mass::Weighed;
use crate::attend::options::Read;
use crate::base::host_slice::HostSlice;
use crate::metrics::Reused;
use crate::router::met::Met;
use pikv_core::plan::LayerShape;
use std::collections::HashMap;

/// Softmax weights and hits of one KV head in a step.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    /// Index of the sequence in the call.
    pub sequence: usize,
    pub head: usize,
    /// Tokens that had been filed then.
    pub filed: u32,
    pub weighed: Weighed,
    /// `[rows][group][k_dim]`, if something is kept of heads.
    pub queries: Vec<f32>,
    /// Pages that were used again, where the policy observed them.
    pub reused: Vec<Reused>,
    /// What the rows wanted and met, by row and expert, where hits are counted; and bytes of wanted pages that lay on other ranks.
    pub met: Vec<Met>,
    pub far: u64,
}

/// A sequence of the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Of {
    /// Tokens that had been filed.
    pub filed: u32,
    /// First row and number of rows of the sequence in the call.
    pub first: usize,
    pub rows: usize,
    /// The pages that they read. Unless these are all, they are attended one by one.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    pub read: Read,
}

impl Feed {
    /// Nothing was seen yet of a head.
    pub fn start(&mut self, sequence: usize, head: usize) {
        (self.sequence, self.head, self.filed) = (sequence, head, 0);
        self.weighed.clear();
        self.queries.clear();
        self.reused.clear();
        self.met.clear();
        self.far = 0;
    }

    /// Notes whose it is: what was known of the sequence, and the head's queries out of those of the call, if any are asked for.
    pub fn belongs(&mut self, of: &Of, shape: &LayerShape, q: Option<HostSlice<'_>>) {
        self.filed = of.filed;
        let Some(q) = q else { return };
        let (group, k_dim) = (shape.group() as usize, shape.layout.k_dim as usize);
        for row in of.first..of.first + of.rows {
            let at = (row * shape.query_heads as usize + self.head * group) * k_dim;
            q.part(at, group * k_dim).extend(&mut self.queries);
        }
    }

    /// Whose it is.
    pub fn of(&self) -> (usize, usize) {
        (self.sequence, self.head)
    }
}

/// Puts together what rows of a head saw that were attended apart, page by page, and orders by sequence and head.
pub(crate) fn together(feeds: &mut Vec<Feed>) {
    feeds.sort_by_key(Feed::of);
    let mut index = HashMap::new();
    feeds.dedup_by(|next, kept| {
        if next.of() != kept.of() {
            index.clear();
            return false;
        }
        let (next, kept) = (&next.weighed, &mut kept.weighed);
        if index.is_empty() {
            index = kept.index();
        }
        kept.merge(&mut index, next);
        true
    });
}
