//! A policy's state of a run, as words of a saved sequence.

use super::{Apart, GONE, Mark, TokenStates};
use crate::base::error::Error;
use crate::base::fields::{Fields, put_floats, sure};
use pikv_core::page::Position;
use pikv_core::warp::LANES;

impl TokenStates {
    /// Appends the state of the pages for which `is_left`: for each page whether it has rows, its last use, and the rows.
    pub fn save(&self, to: &mut Vec<u32>, is_left: impl Fn(usize) -> bool) {
        for (i, mark) in self.pages.iter().enumerate().filter(|(i, _)| is_left(*i)) {
            to.extend([u32::from(mark.slot != GONE), mark.used]);
            for version in 0..self.versions {
                put_floats(to, self.rows(i, version).unwrap_or_default().as_flattened());
            }
        }
    }

    /// Reads the output of [`TokenStates::save`] for `pages` pages; `self` is of a run without pages.
    ///
    /// # Errors
    /// Words that are not such an output.
    pub fn load(&mut self, from: &mut Fields<'_>, pages: usize) -> Result<(), Error> {
        if self.versions == 0 {
            return Ok(());
        }
        for _ in 0..pages {
            let [has, used] = [from.word()?, from.word()?];
            sure(has <= 1 && used <= Position::MAX.0, "a page that was used later than there are tokens")?;
            if has == 0 {
                self.pages.push_back(Mark { slot: GONE, used });
                continue;
            }
            let words = from.slice(self.versions * self.words * LANES)?;
            let slot = self.take();
            self.pages.push_back(Mark { slot, used });
            for (version, words) in words.chunks_exact(self.words * LANES).enumerate() {
                let rows = self.of(slot, version);
                let to = self.rows[rows].as_flattened_mut();
                to.iter_mut().zip(words).for_each(|(to, word)| *to = f32::from_bits(*word));
            }
        }
        Ok(())
    }
}

impl Apart {
    /// Appends the number of rows, and the rows.
    pub fn save(&self, to: &mut Vec<u32>) {
        to.push(self.0.len() as u32);
        put_floats(to, self.0.as_flattened());
    }

    /// Reads the output of [`Apart::save`], for a page of a run like `run`.
    ///
    /// # Errors
    /// Words that are not such an output.
    pub fn load(from: &mut Fields<'_>, run: &TokenStates) -> Result<Apart, Error> {
        let n = from.count(LANES)?;
        sure(n == 0 || n == run.versions * run.words, "rows that the policy does not keep")?;
        let mut rows = vec![[0.0; LANES]; n].into_boxed_slice();
        from.floats(rows.as_flattened_mut())?;
        Ok(Apart(rows))
    }
}
