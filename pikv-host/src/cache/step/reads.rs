//! Attention options for one sequence of a step.

use super::{Part, Step};
use crate::attend::options::{Attend, ReadPages};
use crate::base::error::Error;

impl Step<'_> {
    /// Sets the pages that the rows of one sequence read in all later calls of [`attend`](Step::attend) in the step, instead of
    /// [`Attend::read`], which then holds for the other sequences only. `sequence` is its index in the arguments of
    /// [`Cache::begin`](crate::Cache::begin). Results have the bits of a step of that sequence alone with this option.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, ReadPages};
    ///
    /// let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    /// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(32).key_bounds(true))?;
    /// let (mut long, mut short) = (cache.sequence(), cache.sequence());
    /// for n in [500, 1] {
    ///     let mut step = cache.begin([(&mut long, n), (&mut short, 1)])?;
    ///     step.set_read(0, ReadPages::Quest { pages: 4 })?;        // the short one reads all
    ///     let rows = vec![0.5; step.rows() * 4];
    ///     step.append(0, &rows, &rows)?;
    ///     step.attend(0, &rows, &Attend::new(0.5), AttendOutput::new(&mut vec![0.0; rows.len()]))?;
    ///     step.commit()?;
    /// }
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotInStep`]; [`Error::NoBounds`] for [`ReadPages::Quest`] in a cache without [`key_bounds`](crate::CacheConfig::key_bounds).
    pub fn set_read(&mut self, sequence: usize, read: ReadPages) -> Result<(), Error> {
        if matches!(read, ReadPages::Quest { .. }) && !self.inner.shape.config.key_bounds {
            return Err(Error::NoBounds);
        }
        self.part_mut(sequence)?.read = Some(read);
        Ok(())
    }

    /// Sets whether the rows of one sequence treat sinks as adjacent to the oldest held token, in all later calls of
    /// [`attend`](Step::attend) in the step, instead of [`Attend::closed_gaps`]. `sequence` as in [`set_read`](Step::set_read).
    ///
    /// # Errors
    /// [`Error::NotInStep`]. For a layer that stores keys after their rotation, [`attend`](Step::attend) then returns
    /// [`Error::NoRotation`].
    pub fn set_closed_gaps(&mut self, sequence: usize, on: bool) -> Result<(), Error> {
        self.part_mut(sequence)?.closed_gaps = Some(on);
        Ok(())
    }

    /// Pages that the rows of each live sequence read in a call.
    pub(crate) fn reads_of(&self, options: &Attend) -> impl Iterator<Item = ReadPages> {
        self.live().map(|part| part.read.unwrap_or(options.read))
    }
}

impl<'a> Step<'a> {
    fn part_mut(&mut self, sequence: usize) -> Result<&mut Part<'a>, Error> {
        let sequences = self.parts.len();
        self.parts.get_mut(sequence).ok_or(Error::NotInStep { sequence, sequences })
    }
}
