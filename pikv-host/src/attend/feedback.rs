//! Softmax weights and hits of one KV head, for the layer's policy and the router.

use crate::attend::mass::PageWeights;
use crate::attend::options::ReadPages;
use crate::base::host_slice::HostSlice;
use crate::metrics::Reused;
use crate::router::met::Met;
use pikv_core::plan::LayerShape;
use std::collections::HashMap;

/// Softmax weights and hits of one KV head in a step.
#[derive(Debug, Default)]
pub(crate) struct HeadFeedback {
    /// Index of the sequence in the call.
    pub sequence: usize,
    pub head: usize,
    /// Filed tokens of the sequence at the time of the call.
    pub filed: u32,
    pub weighed: PageWeights,
    /// `[rows][group][k_dim]`, if the policy keeps state of heads.
    pub queries: Vec<f32>,
    /// Reuses of pages, if the policy recorded them.
    pub reused: Vec<Reused>,
    /// Wanted and held pages by row and expert, if hits are counted; and bytes of wanted pages on other ranks.
    pub met: Vec<Met>,
    pub far: u64,
}

/// Rows of one sequence in a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Of {
    /// Filed tokens of the sequence.
    pub filed: u32,
    /// First row and number of rows of the sequence in the call.
    pub first: usize,
    pub rows: usize,
    /// Pages that the rows read. Unless it is [`ReadPages::All`], rows are attended one by one.
    pub read: ReadPages,
}

impl HeadFeedback {
    /// Resets the feed for a head.
    pub fn start(&mut self, sequence: usize, head: usize) {
        (self.sequence, self.head, self.filed) = (sequence, head, 0);
        self.weighed.clear();
        self.queries.clear();
        self.reused.clear();
        self.met.clear();
        self.far = 0;
    }

    /// Adds the state of the sequence, and the head's queries if `q` has those of the call.
    pub fn belongs(&mut self, of: &Of, shape: &LayerShape, q: Option<HostSlice<'_>>) {
        self.filed = of.filed;
        let Some(q) = q else { return };
        let (group, k_dim) = (shape.group() as usize, shape.layout.k_dim as usize);
        for row in of.first..of.first + of.rows {
            let at = (row * shape.query_heads as usize + self.head * group) * k_dim;
            q.part(at, group * k_dim).extend(&mut self.queries);
        }
    }

    /// Sequence and head.
    pub fn of(&self) -> (usize, usize) {
        (self.sequence, self.head)
    }
}

/// Merges the feeds of rows of a head that were attended one by one, page by page, and sorts by sequence and head.
pub(crate) fn together(feeds: &mut Vec<HeadFeedback>) {
    feeds.sort_by_key(HeadFeedback::of);
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
