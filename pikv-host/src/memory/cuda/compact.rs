//! Compaction: moves of tokens between pages that are both read and written.

use super::MovedToken;
use crate::base::error::Error;
use crate::device::Device;
use crate::device::driver::arguments;
use crate::device::kernels::Kernel;
use crate::device::ring::Upload;
use pikv_core::page::Layout;
use pikv_kernels::args::{CopyArg, LayoutArg};

impl Device {
    /// Moves tokens to `pages` pages, through scratch memory, because a target may be the source of another move. With
    /// `assembled` the host fills the scratch memory with complete pages. All moves are done or none, unless the device is lost.
    pub fn compact(
        &self,
        layout: &Layout,
        moved: &[MovedToken],
        pages: usize,
        assembled: Option<&[Vec<u32>]>,
    ) -> Result<(), Error> {
        if moved.is_empty() {
            return Ok(());
        }
        let mut work = self.work()?;
        let stream = &self.stream;
        let between = work.scratch(stream, pages as u64 * layout.bytes())?;
        let at = |moved: &MovedToken| between + moved.at as u64 * layout.bytes();
        let first = |moved: &MovedToken| CopyArg {
            source: moved.source,
            target: at(moved),
            from: moved.from,
            to: moved.to,
        };
        let then = |moved: &MovedToken| CopyArg {
            source: at(moved),
            target: moved.target,
            from: moved.to,
            to: moved.to,
        };
        let (first, then): (Vec<CopyArg>, Vec<CopyArg>) =
            (moved.iter().map(first).collect(), moved.iter().map(then).collect());
        let mut upload = Upload::new();
        let (first_at, then_at) = (upload.add(&first), upload.add(&then));
        let base = work.send(stream, &upload)?;
        let (arg, count) = (LayoutArg::from(*layout), moved.len() as u32);
        match assembled {
            Some(pages) => {
                let targets = (0..).zip(pages).map(|(i, words)| (between + i * layout.bytes(), &words[..]));
                work.write(stream, &targets.collect::<Vec<_>>())?;
            }
            None => {
                let list = base + first_at;
                // SAFETY: the parameters of `copy_tokens`: from pages that the sequence holds to scratch memory that only this call uses.
                unsafe { self.launch(Kernel::CopyTokens, moved.len(), arguments!(arg, list, count))? };
            }
        }
        let list = base + then_at;
        // SAFETY: the parameters of `copy_tokens`: from that memory to pages that only this sequence holds.
        unsafe { self.launch(Kernel::CopyTokens, moved.len(), arguments!(arg, list, count))? };
        Ok(())
    }
}
