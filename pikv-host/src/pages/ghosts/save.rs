//! Saves and restores the known pages of a head.

use super::{Ghosts, Mark, Open, SHEET, Sheet};
use crate::base::error::Error;
use crate::base::fields::{Fields, sure};
use crate::memory::ghost_bytes::Total;
use pikv_core::bound;
use pikv_core::page::{Layout, PAGE};
use pikv_core::warp::LANES;
use std::sync::Arc;

impl Ghosts {
    /// Number of tiles that were added.
    pub fn done(&self) -> u32 {
        self.done
    }

    /// Adds the number of tiles, the known pages, and the partial ones.
    pub fn save(&self, to: &mut Vec<u32>) {
        to.push(self.done);
        to.push(self.sheets.iter().map(|sheet| sheet.marks.len() as u32).sum());
        for sheet in &self.sheets {
            for (mark, words) in sheet.marks.iter().zip(sheet.words.chunks_exact(sheet.rows)) {
                to.extend([u32::from(mark.expert), mark.first, mark.last]);
                to.extend(words.as_flattened());
            }
        }
        to.push(self.open.len() as u32);
        for open in &self.open {
            to.extend([u32::from(open.expert), open.tokens, open.first]);
            to.extend(open.words.as_flattened());
        }
    }

    /// Reads the data of [`Ghosts::save`], for a head of this layout in a sequence of `len` tokens.
    ///
    /// # Errors
    /// Invalid data.
    pub fn load(
        from: &mut Fields<'_>,
        layout: &Layout,
        experts: u32,
        len: u32,
        total: &Arc<Total>,
    ) -> Result<Ghosts, Error> {
        let rows = bound::rows(layout.k_dim);
        let mut ghosts = Ghosts { done: from.word()?, ..Ghosts::default() };
        sure(ghosts.done <= len / PAGE, "known pages of tokens to come")?;
        let pages = from.count(3 + rows * LANES)?;
        for page in 0..pages {
            let [expert, first, last] = [from.word()?, from.word()?, from.word()?];
            sure(
                expert < experts && first <= last && last < len,
                "a known page of tokens that are not there",
            )?;
            if page % SHEET == 0 {
                ghosts.sheets.push_back(Arc::new(Sheet::new(rows, total)));
            }
            let words = from.slice(rows * LANES)?;
            if let Some(sheet) = ghosts.sheets.back_mut().map(Arc::make_mut) {
                sheet.marks.push(Mark { expert: expert as u16, first, last });
                sheet.words.extend_from_slice(words.as_chunks().0);
            }
        }
        let open = from.count(3 + rows * LANES)?;
        let mut least = 0;
        for _ in 0..open {
            let [expert, tokens, first] = [from.word()?, from.word()?, from.word()?];
            let ascends = expert >= least && expert < experts;
            sure(ascends && tokens < PAGE && first < len, "tokens of an expert that are not there")?;
            least = expert + 1;
            let words = from.slice(rows * LANES)?.as_chunks().0.to_vec();
            ghosts.open.push(Open { expert: expert as u16, tokens, first, words, wipe: total.wipe });
        }
        Ok(ghosts)
    }
}
