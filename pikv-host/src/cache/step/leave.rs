//! Sequences that leave a step under way.

use super::{Done, Part, Step};
use crate::base::error::Error;
use std::ops::Range;

impl Step<'_> {
    /// Takes one sequence out of the step, at any time before the commit: its client hung up, or its deadline passed. `sequence` is its place
    /// among those that the step began with. What the step wrote of it is undone, as if the step had been dropped, and its pages are
    /// free at once; the others go on with the bits that they have in a step without it. What was set aside for it and not taken is free
    /// when the step ends. One that was left out before stays so.
    ///
    /// **Rows stay where they are**: an engine's tensors and kernels have the layout of the batch that it began, so every slice has the
    /// rows of all sequences still, and indices of sequences do not change. Nothing is read of the rows of one that was left out (keys,
    /// values, queries, experts), so they may be anything, NaN too. Their places in outputs are left as they are, and there are no masses
    /// of it. A step that all were left out of commits nothing.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output};
    ///
    /// let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    /// let cache = Cache::new(CacheConfig::new(vec![layer; 2], 1 << 20))?;
    /// let (mut gone, mut stays) = (cache.sequence(), cache.sequence());
    /// let mut step = cache.begin([(&mut gone, 2), (&mut stays, 1)])?;
    /// step.append(0, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
    /// step.leave_out(0)?;                                     // its client hung up
    /// let mut out = [7.0; 3 * 4];
    /// step.attend(0, &[1.0; 3 * 4], &Attend::new(0.5), Output::new(&mut out))?;
    /// assert_eq!((&out[..8], &out[8..]), (&[7.0; 8][..], &[0.25; 4][..]));
    /// step.append(1, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
    /// step.commit()?;
    /// assert_eq!((gone.next_position().0, stays.next_position().0), (0, 1));
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// O(what the step wrote of it). With tensors of the device it waits for what was asked of the device so far.
    ///
    /// # Errors
    /// [`Error::NotInStep`]; of tensors of the device what [`Step::check`] finds, as a fault of one row hides those after it: the step can
    /// only be dropped then. A device that fails. The sequence is in the step still.
    pub fn leave_out(&mut self, sequence: usize) -> Result<(), Error> {
        let sequences = self.parts.len();
        let part = self.parts.get(sequence).ok_or(Error::NotInStep { sequence, sequences })?;
        if part.out {
            return Ok(());
        }
        self.check()?;
        // What a call that failed left to be copied would go to pages that are free then.
        self.pages.flush_copies()?;
        let (inner, part) = (self.inner.clone(), &mut self.parts[sequence]);
        part.abort(&inner);
        part.out = true;
        self.layers.iter_mut().for_each(|done| done.leave_out(sequence));
        event!("left out", sequence = sequence, rows = self.parts[sequence].rows());
        Ok(())
    }

    /// Whether a sequence was left out.
    pub(crate) fn is_out(&self, sequence: usize) -> bool {
        self.parts[sequence].out
    }

    /// Rows of the sequences that were left out, ascending.
    pub(crate) fn gaps(&self) -> impl Iterator<Item = Range<usize>> {
        self.parts.iter().filter(|part| part.out).map(|part| part.row..part.row + part.rows())
    }

    /// Whether one of them was.
    pub(crate) fn any_out(&self) -> bool {
        self.parts.iter().any(|part| part.out)
    }

    /// Rows of the sequences that were not left out.
    pub(crate) fn live_rows(&self) -> usize {
        self.live().map(Part::rows).sum()
    }
}

impl Done {
    /// Counts bytes of lower tiers as if one sequence of several had read none.
    fn leave_out(&mut self, sequence: usize) {
        self.lower.retain(|read| read.sequence != sequence);
        // A page that several read counts once a call.
        let pages = self.lower.chunk_by(|a, b| (a.call, a.slot) == (b.call, b.slot));
        self.remote = pages.map(|read| read[0].bytes).sum();
    }
}
