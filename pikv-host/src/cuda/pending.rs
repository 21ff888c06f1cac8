//! Tokens that are to be written and copied, in as few launches as their order allows.

use super::work::Upload;
use super::{Device, arguments};
use crate::error::Error;
use pikv_core::page::Layout;
use pikv_kernels::args::{CopyArg, LayoutArg, WriteArg};
use std::collections::HashSet;
use std::sync::Arc;

/// What a step has asked of its pages and the device was not told yet.
#[derive(Debug)]
pub(crate) struct Pending {
    device: Arc<Device>,
    writes: Vec<WriteArg>,
    copies: Vec<Copies>,
}

/// Copies that do not depend on each other.
#[derive(Debug)]
struct Copies {
    layout: Layout,
    list: Vec<CopyArg>,
    read: HashSet<u64>,
    written: HashSet<u64>,
}

impl Pending {
    pub fn new(device: Arc<Device>) -> Pending {
        Pending { device, writes: Vec::new(), copies: Vec::new() }
    }

    pub fn write(&mut self, write: WriteArg) {
        self.writes.push(write);
    }

    pub fn copy(&mut self, layout: &Layout, copy: CopyArg) {
        let follows = |last: &&mut Copies| {
            last.layout == *layout
                && !last.written.contains(&copy.source)
                && !last.read.contains(&copy.target)
        };
        if let Some(last) = self.copies.last_mut().filter(follows) {
            last.read.insert(copy.source);
            last.written.insert(copy.target);
            last.list.push(copy);
            return;
        }
        let (read, written) = (HashSet::from([copy.source]), HashSet::from([copy.target]));
        self.copies.push(Copies { layout: *layout, list: vec![copy], read, written });
    }

    /// Forgets the last copy to a lane.
    pub fn forget_copy(&mut self, target: u64, to: u32) {
        for copies in self.copies.iter_mut().rev() {
            if let Some(at) = copies.list.iter().rposition(|copy| (copy.target, copy.to) == (target, to)) {
                copies.list.remove(at);
                return;
            }
        }
    }

    /// Forgets what was to be written. Copies stay: pages that were copied for these writes are in their places already.
    pub fn forget_writes(&mut self) {
        self.writes.clear();
    }

    /// Launches the writes, whose rows are those of `k` and `v`.
    pub fn launch_writes(&mut self, layout: &Layout, k: &[f32], v: &[f32]) -> Result<(), Error> {
        let device = &self.device;
        let mut work = device.work()?;
        let mut upload = Upload::new();
        let (at_k, at_v, at_list) = (upload.add(k), upload.add(v), upload.add(&self.writes));
        let base = work.send(&device.stream, &upload)?;
        let (layout, count) = (LayoutArg::from(*layout), self.writes.len() as u32);
        let (k, v, list) = (base + at_k, base + at_v, base + at_list);
        // SAFETY: the parameters of `append`. Rows and pages are those of the call and of the step, which holds the pages; a step
        // writes a lane once.
        unsafe {
            device.launch(device.kernels.append, self.writes.len(), arguments!(layout, k, v, list, count))?;
        }
        self.writes.clear();
        Ok(())
    }

    /// Launches the copies, in their order. What could not be launched stays.
    pub fn launch_copies(&mut self) -> Result<(), Error> {
        if self.copies.is_empty() {
            return Ok(());
        }
        let device = &self.device;
        let mut work = device.work()?;
        while let Some(copies) = self.copies.first() {
            if copies.list.is_empty() {
                self.copies.remove(0);
                continue;
            }
            let mut upload = Upload::new();
            upload.add(&copies.list);
            let list = work.send(&device.stream, &upload)?;
            let (layout, count) = (LayoutArg::from(copies.layout), copies.list.len() as u32);
            // SAFETY: the parameters of `copy_tokens`. The pages are held by the step's sequences; what one copy writes no other of
            // the list reads.
            unsafe {
                device.launch(
                    device.kernels.copy_tokens,
                    copies.list.len(),
                    arguments!(layout, list, count),
                )?;
            }
            self.copies.remove(0);
        }
        Ok(())
    }
}
