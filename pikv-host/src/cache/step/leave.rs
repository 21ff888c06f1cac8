//! Leaving sequences out of a step under way.

use super::{Done, Part, Step};
use crate::base::error::Error;
use std::ops::Range;

impl Step<'_> {
    /// Takes one sequence out of the step, at any time before the commit, for example because its client hung up or its deadline passed.
    /// `sequence` is its index in the arguments of [`Cache::begin`](crate::Cache::begin). Its part of the step is undone, and the pages
    /// taken for it are freed at once; the other sequences get the bits of a step without it. Memory reserved for it but not taken is freed
    /// when the step ends. Leaving out a sequence twice has no effect.
    ///
    /// **Rows stay where they are**: tensors and kernels of an engine keep the layout of the batch, so every slice has the rows of all
    /// sequences, and indices of sequences do not change. Inputs of a sequence that was left out (keys, values, queries, experts) are not
    /// read, so they may be anything, even NaN. Its rows of outputs are not written, and it gets no masses. If all sequences are left out,
    /// the commit does nothing.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    /// let cache = Cache::new(CacheConfig::new(vec![layer; 2], 1 << 20))?;
    /// let (mut gone, mut stays) = (cache.sequence(), cache.sequence());
    /// let mut step = cache.begin([(&mut gone, 2), (&mut stays, 1)])?;
    /// step.append(0, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
    /// step.leave_out(0)?;                                     // its client hung up
    /// let mut out = [7.0; 3 * 4];
    /// step.attend(0, &[1.0; 3 * 4], &Attend::new(0.5), AttendOutput::new(&mut out))?;
    /// assert_eq!((&out[..8], &out[8..]), (&[7.0; 8][..], &[0.25; 4][..]));
    /// step.append(1, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
    /// step.commit()?;
    /// assert_eq!((gone.next_position().0, stays.next_position().0), (0, 1));
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// O(bytes that the step wrote for it). With tensors on the device it waits for the step's work on the device.
    ///
    /// # Errors
    /// [`Error::NotInStep`]; with tensors on the device the errors of [`Step::check`], since an error in one row hides later ones: the step
    /// can then only be dropped. [`Error::Device`]. After an error the sequence is still in the step.
    pub fn leave_out(&mut self, sequence: usize) -> Result<(), Error> {
        let sequences = self.parts.len();
        let part = self.parts.get(sequence).ok_or(Error::NotInStep { sequence, sequences })?;
        if part.out {
            return Ok(());
        }
        self.check()?;
        // Pending copies of a failed call must not write to pages that are freed below.
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

    /// Whether any sequence was left out.
    pub(crate) fn any_out(&self) -> bool {
        self.parts.iter().any(|part| part.out)
    }

    /// Rows of the sequences that were not left out.
    pub(crate) fn live_rows(&self) -> usize {
        self.live().map(Part::rows).sum()
    }
}

impl Done {
    /// Removes the sequence's reads of lower tiers from the count.
    fn leave_out(&mut self, sequence: usize) {
        self.lower.retain(|read| read.sequence != sequence);
        // A page that several sequences read counts once a call.
        let pages = self.lower.chunk_by(|a, b| (a.call, a.slot) == (b.call, b.slot));
        self.remote = pages.map(|read| read[0].bytes).sum();
    }
}
