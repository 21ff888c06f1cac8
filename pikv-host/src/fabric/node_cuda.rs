//! A fabric's rank on a device: writes pages and tokens to device memory, reads blocks, and copies their partial results back to the host.

use crate::attend_cuda::attend::{Shape, WAVE};
use crate::attend_cuda::wave::{ItemQueries, Wave, most, packed_room};
use crate::base::error::Error;
use crate::device::Device;
use crate::device::driver::arguments;
use crate::device::kernels::Kernel;
use crate::device::ring::Upload;
use crate::fabric::ask::Ask;
use pikv_core::attend::BLOCK;
use pikv_core::mass::ROW;
use pikv_core::merge::Partial;
use pikv_core::page::{Layout, PAGE};
use pikv_core::warp::LANES;
use pikv_kernels::args::{CopyArg, JoinArg, LayoutArg, SightArg, TaskArg};
use pikv_lanes::attend::bundles;
use std::ptr;

/// Words copied through pinned memory at a time: 16 MiB, or one page.
const ONCE: usize = 4 << 20;

impl Device {
    /// Whether every call fails, as earlier work on the device failed.
    pub fn is_lost(&self) -> bool {
        self.enter().is_err() || self.stream.synchronize().is_err()
    }

    /// Writes pages, or other data, to device addresses.
    pub fn write_all(&self, pages: &[(u64, &[u32])]) -> Result<(), Error> {
        let mut rest = pages;
        while !rest.is_empty() {
            let mut words = 0;
            let fits = |(_, page): &&(u64, &[u32])| {
                words += page.len();
                words <= ONCE
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            self.work()?.write(&self.stream, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Writes `count` tokens to pages. `token` writes one to a lane of a page in host memory, and returns the address of its page and its
    /// lane there. No lane may occur twice.
    pub fn place(
        &self,
        layout: &Layout,
        count: usize,
        token: impl Fn(usize, &mut [u32], u32) -> (u64, u32),
    ) -> Result<(), Error> {
        let words = layout.words() as usize;
        let once = (ONCE / words).max(1) * LANES;
        for first in (0..count).step_by(once) {
            let tokens = first..count.min(first + once);
            let mut staged = vec![0; tokens.len().div_ceil(LANES) * words];
            let mut work = self.work()?;
            let stream = &self.stream;
            let base = work.scratch(stream, size_of_val(&staged[..]) as u64)?;
            let copy = |(i, index): (usize, usize)| {
                let (page, from) = (i / LANES, i as u32 % PAGE);
                let (target, to) = token(index, &mut staged[page * words..][..words], from);
                CopyArg { source: base + page as u64 * layout.bytes(), target, from, to }
            };
            let copies: Vec<CopyArg> = tokens.enumerate().map(copy).collect();
            work.write(stream, &[(base, &staged)])?;
            let mut upload = Upload::new();
            upload.add(&copies);
            let list = work.send(stream, &upload)?;
            let (layout, count) = (LayoutArg::from(*layout), copies.len() as u32);
            // SAFETY: the parameters of `copy_tokens`: from memory that only this call uses to pages that the store holds, each lane once.
            unsafe {
                self.launch(Kernel::CopyTokens, copies.len(), arguments!(layout, list, count))?;
            }
        }
        Ok(())
    }

    /// Appends the answers to questions, in order: [`Ask::compute`] on the device.
    pub fn partials(&self, asks: &[Ask<'_>], out: &mut Vec<u32>) -> Result<(), Error> {
        let mut rest = asks;
        while let Some(first) = rest.first() {
            let mut size = 0;
            let fits = |ask: &&Ask<'_>| {
                size += cost(ask);
                let same = ptr::eq(ask.shape, first.shape) && ask.raw == first.raw;
                same && ask.softcap == first.softcap && size as u64 <= WAVE
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            self.wave(now, out)?;
            rest = later;
        }
        Ok(())
    }

    /// Questions about one layer that are computed together.
    fn wave(&self, asks: &[Ask<'_>], out: &mut Vec<u32>) -> Result<(), Error> {
        let Some(first) = asks.first() else { return Ok(()) };
        let mut wave = Wave::default();
        // Results to copy back lie before those that are merged into them.
        let kept = asks.iter().map(|ask| part(ask) * if ask.merged { 1 } else { ask.blocks.len() }).sum();
        let (mut to, mut spare) = (0, kept as u64);
        for ask in asks {
            wave.ask(ask, &mut to, &mut spare);
        }
        wave.parts = spare;
        let mut work = self.work()?;
        let stream = &self.stream;
        // Sums of rows that see no token, and weights of pages that no row sees, are written by no kernel: zero them.
        let parts = work.parts(stream, wave.parts)?;
        self.fill(parts, 0, kept as u32)?;
        let mut places = vec![(parts, kept)];
        if wave.raw > 0 {
            let raw = work.raw(stream, wave.raw)?;
            self.fill(raw, 0, wave.raw as u32)?;
            places.push((raw, wave.raw as usize));
        }
        let shape = Shape { of: first.shape, table: first.table(), softcap: first.softcap, on_device: None };
        wave.launch(self, &mut work, &shape, None)?;
        work.fetch_all(stream, &places, |words| {
            let (mut parts, mut raw) = words.split_at(kept);
            for ask in asks {
                for block in ask.blocks.iter().take(if ask.merged { 1 } else { usize::MAX }) {
                    parts = add_part(ask, parts, out);
                    if ask.raw {
                        raw = add_raw(ask, block.len(), raw, out);
                    }
                }
            }
        })
    }
}

/// f32 of a partial result over all rows.
fn part(ask: &Ask<'_>) -> usize {
    Partial::len(ask.rows, ask.acc_rows())
}

/// Bundles of rows that are read together.
fn widths(ask: &Ask<'_>) -> impl Iterator<Item = (usize, usize)> {
    bundles(ask.rows, most(ask.codec.into_iter()))
}

/// f32 of device memory that a question takes.
fn cost(ask: &Ask<'_>) -> usize {
    let mut row = part(ask) / ask.rows + if ask.raw { ROW } else { 0 };
    if ask.codec.is_some() {
        row += packed_room(ask.table().is_some());
    }
    ask.rows * ask.blocks.len() * row
}

/// Appends a partial result from its bundles; returns the words after it.
fn add_part<'w>(ask: &Ask<'_>, words: &'w [u32], out: &mut Vec<u32>) -> &'w [u32] {
    let (words, rest) = words.split_at(part(ask));
    let row = ask.acc_rows() as usize * LANES;
    // Sums, then exponents, then sums of weights.
    for (from, width) in [(0, row), (row, 1), (row + 1, 1)] {
        let of = |(first, rows)| {
            let bundle = &words[first * (row + 2)..][..rows * (row + 2)];
            &bundle[from * rows..][..width * rows]
        };
        widths(ask).for_each(|bundle| out.extend_from_slice(of(bundle)));
    }
    rest
}

/// Appends a block's weights, `[rows][pages]` rows of lanes; returns the words after them.
fn add_raw<'w>(ask: &Ask<'_>, pages: usize, words: &'w [u32], out: &mut Vec<u32>) -> &'w [u32] {
    let (words, rest) = words.split_at(ask.rows * ROW);
    for (first, rows) in widths(ask) {
        let bundle = &words[first * ROW..][..rows * BLOCK * LANES];
        bundle.chunks_exact(BLOCK * LANES).for_each(|row| out.extend_from_slice(&row[..pages * LANES]));
    }
    rest
}

impl<'a> Wave<'a> {
    /// Adds a question. Results to copy back lie from `to` on, others from `spare` on.
    fn ask(&mut self, ask: &Ask<'a>, to: &mut u64, spare: &mut u64) {
        let channels = ask.shape.layout.k_channels() as usize;
        // Position of each row's queries: start of its bundle, width of the bundle, and index in it.
        let given: Vec<(usize, usize, usize)> = bundles(ask.rows, ask.most)
            .flat_map(|(row, width)| (0..width).map(move |r| (row * channels, width, r)))
            .collect();
        let first_page = self.pages.len() as u32;
        for of in ask.blocks.iter().flatten() {
            self.pages.push(of.page.address());
            self.live.push(of.live);
            self.last.push(of.last);
            self.by.push(of.by);
        }
        for (row, width) in widths(ask) {
            let q = self.q.len() as u32;
            for c in 0..channels {
                let of = |(at, wide, r): &(usize, usize, usize)| ask.q[at + c * wide + r];
                self.q.extend(given[row..row + width].iter().map(of));
            }
            let sights = self.sights.len() as u32;
            self.sights.extend(ask.sights[row..row + width].iter().map(|(pool, _)| SightArg::from(*pool)));
            let whole = ask.table().map(|_| q);
            let packed = ask.codec.map(|codec| {
                self.bundle(codec, (row, width), whole, ItemQueries::Host(ask.folded, ask.start))
            });
            let len = Partial::len(width, ask.acc_rows()) as u64;
            let mut pages = first_page;
            let mut parts = Vec::with_capacity(ask.blocks.len());
            for (i, block) in ask.blocks.iter().enumerate() {
                let part = match ask.merged {
                    // The first block's result of a bundle becomes the merged result.
                    true if i > 0 => {
                        *spare += len;
                        *spare - len
                    }
                    true => *to + (row * (part(ask) / ask.rows)) as u64,
                    false => *to + (i * part(ask) + row * (part(ask) / ask.rows)) as u64,
                };
                parts.push(part);
                let count = block.len() as u32;
                let raw = if ask.raw { self.raw + ((i * ask.rows + row) * ROW) as u64 } else { 0 };
                let task = TaskArg { part, raw, q: packed.map_or(q, |(_, q)| q), pages, count, sights };
                pages += count;
                match packed {
                    Some((of, _)) => self.packed[of].tasks.push(task),
                    None => self.tasks[width.ilog2() as usize].push(task),
                }
            }
            if ask.merged {
                self.merge(&parts, width, ask.acc_rows());
            }
        }
        *to += (part(ask) * if ask.merged { 1 } else { ask.blocks.len() }) as u64;
        self.raw += if ask.raw { (ask.blocks.len() * ask.rows * ROW) as u64 } else { 0 };
    }

    /// Adds the joins of a tree over consecutive partial results, and their rows.
    fn merge(&mut self, parts: &[u64], rows: usize, acc_rows: u32) {
        for level in 0..(usize::BITS - (parts.len() - 1).leading_zeros()) as usize {
            let half = 1 << level;
            for left in (0..parts.len() - half).step_by(2 * half) {
                let (left, right) = (parts[left], parts[left + half]);
                self.joins.add(level, JoinArg { left, right, acc_rows, head: JoinArg::MERGE });
            }
        }
        self.end_bundle(parts[0], rows, |_| 0);
    }
}
