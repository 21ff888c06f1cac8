//! The committed PTX returns the same bits as the CPU, and accesses no other memory: run warp by warp by the interpreter, whose own checks
//! are tested here too.

use bytemuck::bytes_of;
use pikv::lanes::Lanes;
use pikv_core::attend::{BLOCK, Sight, filled};
use pikv_core::dtype::Dtype;
use pikv_core::full::PageRef;
use pikv_core::mass::ROW;
use pikv_core::merge::Partial;
use pikv_core::page::{Layout, Position};
use pikv_core::rope::{Pairs, Rope, Rotation};
use pikv_core::warp::LANES;
use pikv_interpreter::{Cause, Fault, Machine, Memory};
use pikv_kernels::args::{CopyArg, JoinArg, LayoutArg, RopeArg, RowArg, SightArg, TaskArg, WriteArg};
use pikv_lanes::attend::{Block, Common, Finish, bundles};
use pikv_lanes::merge::join;
use pikv_test::numbers::Rng;
use std::time::{Duration, Instant};

const DIMS: [u32; 7] = [1, 32, 33, 64, 80, 128, 256];
const ROWS: [usize; 4] = [1, 2, 4, 8];
/// Positions of the rotation's table; all pages lie below.
const CAPACITY: u32 = 512;

fn text() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../pikv-kernels/ptx/pikv_sm_70.ptx");
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

// ---- Attention -------------------------------------------------------------------------------------------------

struct Page {
    words: Vec<u32>,
    live: u32,
}

/// The input of one launch of `attend_r*`.
struct Case {
    layout: Layout,
    rows: usize,
    blocks: Vec<Vec<Page>>,
    q: Vec<f32>,
    /// `[blocks][rows]`
    sights: Vec<Sight>,
    softcap: Option<f32>,
    rope: Option<Rope>,
    table: Vec<f32>,
    /// Whether the weights are stored.
    weights: bool,
}

/// A page with NaN in unwritten lanes and padding, in every dtype.
fn page(rng: &mut Rng, layout: &Layout, start: u32, fill: u32) -> Page {
    let mut words = vec![u32::MAX; layout.words() as usize];
    if rng.one_in(2) {
        // Positions of unwritten lanes may be anything.
        words[..LANES].fill_with(|| rng.next() as u32);
    }
    let scale = rng.of(&[1.0, 1.0, 1e-6, 100.0]);
    for lane in 0..fill {
        let key = rng.values(layout.k_dim as usize, 1.0);
        let value = rng.values(layout.v_dim as usize, scale);
        layout.write(&mut words, lane, Position(start + lane), &key, &value).expect("finite");
    }
    // Tokens in between may have been dropped.
    let live = if rng.one_in(3) { rng.next() as u32 } else { u32::MAX };
    Page { words, live: filled(fill) & live }
}

fn sight(rng: &mut Rng, last: u32) -> Sight {
    let hi = rng.below(last + 8) as i32;
    let lo = if rng.one_in(2) { 0 } else { (hi as u32).saturating_sub(rng.below(100)) };
    let sinks = rng.of(&[0, 0, 1, 4, 37]);
    let floor = if rng.one_in(3) { rng.below(last + 1) } else { 0 };
    match rng.below(8) {
        0 => Sight::NONE,
        1 | 2 => Sight { floor: 0, lo: 0, sinks: 0, hi: last as i32 },
        _ => Sight { floor, lo, sinks, hi },
    }
}

impl Case {
    fn new(rng: &mut Rng, rows: usize, layout: Layout) -> Case {
        let mut blocks = Vec::new();
        let mut sights = Vec::new();
        for _ in 0..1 + rng.below(3) {
            let pages = rng.of(&[1, 2, 3, 5, BLOCK as u32, BLOCK as u32]);
            let start = rng.of(&[0, 0, 17, 200]);
            blocks.push(Vec::from_iter((0..pages).map(|i| {
                let fill = if rng.one_in(3) { rng.below(33) } else { 32 };
                page(rng, &layout, start + i * 32, fill)
            })));
            let last = start + pages * 32 - 1;
            let first = sight(rng, last);
            let alike = rng.one_in(2);
            sights.extend((0..rows).map(|r| if alike || r == 0 { first } else { sight(rng, last) }));
        }
        let channels = (layout.k_rows() * layout.k.per_word()) as usize;
        let scale = rng.of(&[0.3, 3.0, 3.0, 60.0]);
        let mut q = rng.values(channels * rows, scale);
        q[layout.k_dim as usize * rows..].fill(0.0);
        if rng.one_in(12) {
            // Scores overflow, to NaN as well; or one query is NaN.
            let wild = rng.of(&[3e37, 3e38, f32::INFINITY, f32::NAN]);
            let at = rng.below(layout.k_dim * rows as u32) as usize;
            match wild.is_finite() {
                true => q.iter_mut().for_each(|q| *q *= wild / scale),
                false => q[at] = wild,
            }
        }
        let half = if rng.one_in(2) { 0 } else { rng.below(layout.k_dim / 2 + 1) };
        let pairs = rng.of(&[Pairs::Halves, Pairs::Neighbours]);
        let rope = (half > 0).then_some(Rope::new(10_000.0, 2 * half).pairs(pairs));
        let mut table = Vec::new();
        for i in 0..half {
            let angle = |p: u32| f64::from(p) * 10_000f64.powf(-f64::from(i) / f64::from(half));
            table.extend((0..CAPACITY).map(|p| angle(p).cos() as f32));
            table.extend((0..CAPACITY).map(|p| angle(p).sin() as f32));
        }
        let softcap = rng.one_in(3).then(|| rng.of(&[5.0, 43.3]));
        if let Some(cap) = softcap {
            q.iter_mut().for_each(|q| *q /= cap);
        }
        let weights = rng.one_in(3);
        Case { layout, rows, blocks, q, sights, softcap, rope, table, weights }
    }

    fn len(&self) -> usize {
        Partial::len(self.rows, self.layout.acc_rows())
    }

    /// Parts of all blocks, on the CPU.
    fn host(&self, lanes: Lanes) -> Vec<f32> {
        (0..self.blocks.len()).flat_map(|block| self.attend(lanes, block, None)).collect()
    }

    /// Weights of a block, `[rows][pages]` rows of lanes, and its part, on the CPU.
    fn weights(&self, block: usize) -> (Vec<[f32; LANES]>, Vec<f32>) {
        let mut raw = vec![[f32::NAN; LANES]; self.rows * self.blocks[block].len()];
        let part = self.attend(Lanes::detect(), block, Some(&mut raw));
        (raw, part)
    }

    /// The part of a block, in bundles of as many rows as the lanes hold.
    fn attend(&self, lanes: Lanes, block: usize, raw: Option<&mut [[f32; LANES]]>) -> Vec<f32> {
        let pages: Vec<_> =
            self.blocks[block].iter().map(|p| PageRef { words: &p.words, live: p.live }).collect();
        let sights: Vec<_> =
            self.sights[block * self.rows..][..self.rows].iter().map(|sight| (*sight, *sight)).collect();
        let bundled: Vec<f32> = bundles(self.rows, lanes.rows())
            .flat_map(|(row, width)| {
                self.q.chunks_exact(self.rows).flat_map(move |q| &q[row..row + width]).copied()
            })
            .collect();
        let mut part = vec![f32::NAN; self.len()];
        Block {
            common: Common {
                layout: &self.layout,
                sights: &sights,
                ring: false,
                softcap: self.softcap,
                most: lanes.rows(),
                q: &bundled,
                rotation: self.rope.map(|rope| Rotation { rope, table: &self.table, capacity: CAPACITY }),
                rounded: &[],
            },
            pages: &pages,
            next: [&[]; 2],
            out: Partial::new(&mut part, self.rows, self.layout.acc_rows()),
            first: 0,
            raw,
            tile: None,
        }
        .run(lanes);
        part
    }

    /// Compares the weights that the PTX left at `raw` with the CPU's.
    fn same_weights(&self, memory: &Memory, raw: u64) {
        for (block, pages) in self.blocks.iter().enumerate() {
            let at = |float: usize| raw + 4 * (block * self.rows * ROW + float) as u64;
            let (weights, part) = self.weights(block);
            let width = self.rows * self.layout.acc_rows() as usize * LANES;
            let m: Vec<f32> = memory.read(at(self.rows * (ROW - 1)), self.rows).expect("written");
            for r in 0..self.rows {
                assert_eq!(bits(m[r]), bits(part[width + r]), "m of row {r}, {self:?}");
                for (i, want) in weights[r * pages.len()..][..pages.len()].iter().enumerate() {
                    let got: Vec<f32> = memory.read(at((r * BLOCK + i) * LANES), LANES).expect("written");
                    let same = got.iter().zip(want).all(|(a, b)| bits(*a) == bits(*b));
                    assert!(same, "weights of row {r}, page {i}: {got:?}, {want:?}, {self:?}");
                }
            }
        }
    }

    /// Parts of all blocks, by the PTX.
    fn device(&self, machine: &mut Machine, threads: u32) -> Result<Vec<f32>, Fault> {
        self.device_with(machine, threads, |_, _| {})
    }

    /// [`Case::device`] after `spoil` has had memory and the pages' addresses. Leaves memory as it is if that fails.
    fn device_with(
        &self,
        machine: &mut Machine,
        threads: u32,
        spoil: impl FnOnce(&mut Memory, &[u64]),
    ) -> Result<Vec<f32>, Fault> {
        let memory = &mut machine.memory;
        let l = self.layout;
        let (mut pages, mut lives, mut tasks) = (Vec::new(), Vec::new(), Vec::new());
        for (i, block) in (0u32..).zip(&self.blocks) {
            let (first, sights) = (pages.len() as u32, i * self.rows as u32);
            let part = u64::from(i) * self.len() as u64;
            let raw = u64::from(i) * (self.rows * ROW) as u64;
            tasks.push(TaskArg { part, raw, q: 0, pages: first, count: block.len() as u32, sights });
            for page in block {
                let at = memory.put(&page.words);
                // Unwritten values, and the padding of written ones, must not be touched.
                for lane in 0..LANES as u32 {
                    let row = at + u64::from(l.v_base() + lane * l.v_stride()) * 4;
                    let written = if page.live >> lane & 1 == 1 { l.v_words() } else { 0 };
                    let rest = (l.v_stride() - written) as usize * 4;
                    if rest > 0 {
                        memory.forget(row + u64::from(written) * 4, rest).expect("in the page");
                    }
                }
                pages.push(at);
                lives.push(page.live);
            }
        }
        let count = self.blocks.len() as u32;
        let sights: Vec<SightArg> = self.sights.iter().map(|&s| s.into()).collect();
        let rope = self.rope.map_or(RopeArg::NONE, |r| RopeArg::new(&r, CAPACITY));
        let table = if self.table.is_empty() { 0 } else { memory.put(&self.table) };
        let (q, page_list, live, tasks) =
            (memory.put(&self.q), memory.put(&pages), memory.put(&lives), memory.put(&tasks));
        let (sights, parts) = (memory.put(&sights), memory.allocate(self.len() * self.blocks.len() * 4));
        let raw = if self.weights { memory.allocate(self.blocks.len() * self.rows * ROW * 4) } else { 0 };
        spoil(memory, &pages);
        machine.launch(
            &format!("attend_r{}", self.rows),
            (count * 32).div_ceil(threads),
            threads,
            &[
                bytes_of(&LayoutArg::from(self.layout)),
                bytes_of(&q),
                bytes_of(&page_list),
                bytes_of(&live),
                bytes_of(&tasks),
                bytes_of(&count),
                bytes_of(&sights),
                bytes_of(&self.softcap.unwrap_or(0.0)),
                bytes_of(&rope),
                bytes_of(&table),
                bytes_of(&parts),
                bytes_of(&raw),
            ],
        )?;
        let memory = &mut machine.memory;
        let out = memory.read(parts, self.len() * self.blocks.len()).expect("all was written");
        for address in pages.into_iter().chain([q, page_list, live, tasks, sights, parts]) {
            memory.free(address).expect("allocated above");
        }
        if self.weights {
            self.same_weights(memory, raw);
        }
        for address in [table, raw].into_iter().filter(|address| *address != 0) {
            memory.free(address).expect("allocated above");
        }
        Ok(out)
    }

    fn same(&self, left: &[f32], right: &[f32]) -> Result<(), String> {
        let parts = left.chunks(self.len()).zip(right.chunks(self.len()));
        for (block, (left, right)) in parts.enumerate() {
            same(self.rows, &self.layout, left, right)
                .map_err(|e| format!("block {block}, {e}: {self:?}"))?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Case { layout, rows, blocks, sights, softcap, rope, .. } = self;
        let lives: Vec<Vec<u32>> = blocks.iter().map(|b| b.iter().map(|p| p.live).collect()).collect();
        write!(f, "{layout:?}, {rows} rows, live {lives:x?}, {sights:?}, softcap {softcap:?}, {rope:?}")
    }
}

/// A device's NaN is 0x7fffffff, not the one that a CPU makes: arithmetic on its bits must not turn it into a number.
#[test]
fn a_score_that_is_nan_reaches_the_end() {
    let layout = Layout::new(1, Dtype::F32);
    let case = Case {
        layout,
        rows: 1,
        blocks: vec![vec![Page { live: 1, ..page(&mut Rng(1), &layout, 0, 1) }]],
        q: vec![f32::NAN],
        sights: vec![Sight { floor: 0, lo: 0, sinks: 0, hi: 0 }],
        softcap: None,
        rope: None,
        table: Vec::new(),
        weights: false,
    };
    let device = case.device(&mut Machine::new(&text()).unwrap(), 32).unwrap();
    case.same(&case.host(Lanes::Portable), &device).unwrap();
    assert!(device[LANES + 1].is_nan(), "l is {}", device[LANES + 1]);
}

/// The bits of `x`; those of a NaN are unspecified.
fn bits(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

/// Whether two partial results have the same bits, where these are specified.
fn same(rows: usize, layout: &Layout, left: &[f32], right: &[f32]) -> Result<(), String> {
    let width = layout.acc_rows() as usize * LANES;
    let differ = |what: &str, row: usize, a: f32, b: f32| {
        Err(format!("row {row}: {what} is {a:e} ({:#x}) and {b:e} ({:#x})", a.to_bits(), b.to_bits()))
    };
    for r in 0..rows {
        let [m, l] = [rows * width + r, rows * width + rows + r];
        if bits(left[m]) != bits(right[m]) {
            return differ("m", r, left[m], right[m]);
        }
        if bits(left[l]) != bits(right[l]) {
            return differ("l", r, left[l], right[l]);
        }
        // Of a row with a score that is NaN, and of one that sees nothing, the sums are not specified.
        if left[l].is_nan() || left[m] == f32::NEG_INFINITY {
            continue;
        }
        for i in r * width..(r + 1) * width {
            if bits(left[i]) != bits(right[i]) {
                return differ(&format!("acc {}", i - r * width), r, left[i], right[i]);
            }
        }
    }
    Ok(())
}

fn layouts(rng: &mut Rng) -> Vec<Layout> {
    let mut out = Vec::new();
    for k_dim in DIMS {
        for k in Dtype::ALL {
            out.push(Layout::new(k_dim, k).values(rng.of(&DIMS), rng.of(&Dtype::ALL)));
        }
    }
    out
}

fn attend(rows: usize) {
    let mut machine = Machine::new(&text()).unwrap();
    let mut rng = Rng(0xa77e_0000 + rows as u64);
    let mut busy = Duration::ZERO;
    // One row has the most code: it is unrolled over the pages.
    let rounds = [36, 16, 8, 8][ROWS.iter().position(|&r| r == rows).unwrap()];
    for layout in (0..rounds).flat_map(|_| layouts(&mut rng)).collect::<Vec<_>>() {
        let case = Case::new(&mut rng, rows, layout);
        let threads = rng.of(&[32, 64, 128]);
        let started = Instant::now();
        let device = case.device(&mut machine, threads).unwrap_or_else(|e| panic!("{e}: {case:?}"));
        busy += started.elapsed();
        for lanes in Lanes::available() {
            if let Err(e) = case.same(&case.host(lanes), &device) {
                panic!("{} lanes: {e}", lanes.name());
            }
        }
    }
    let (idle, of) = machine.program.idle(&format!("attend_r{rows}"));
    // The rest are branches of checks that hold; for one row also a ninth page, which LLVM does not know to be impossible.
    assert!(idle.len() * 6 < of, "{rows} rows: of {of} instructions nothing ran {idle:?}");
    let (n, busy) = (machine.program.executed as f64, busy.as_secs_f64());
    println!("{rows} rows: {n} instructions, {:.1e} a second; {} of {of} idle", n / busy, idle.len());
}

#[test]
fn attends_with_the_bits_of_the_cpu() {
    ROWS.iter().for_each(|&rows| attend(rows));
}

// ---- Merge and finish ------------------------------------------------------------------------------------------

/// A partial result of random rows; where a row is the identity its acc is NaN. Which rows are.
fn part(rng: &mut Rng, rows: usize, layout: &Layout) -> (Vec<f32>, Vec<bool>) {
    let mut buffer = vec![f32::NAN; Partial::len(rows, layout.acc_rows())];
    let part = Partial::new(&mut buffer, rows, layout.acc_rows());
    let stride = layout.acc_rows() as usize;
    let identity: Vec<bool> = (0..rows).map(|_| rng.one_in(3)).collect();
    for (r, &none) in identity.iter().enumerate() {
        let far = rng.of(&[4, 40, 140]);
        part.m[r] = if none { f32::NEG_INFINITY } else { rng.below(2 * far + 1) as f32 - far as f32 };
        part.l[r] = if none { 0.0 } else { rng.value(127.0).abs() + 0.25 };
        if !none && rng.one_in(8) {
            // Scores overflowed.
            part.m[r] = rng.of(&[part.m[r], f32::INFINITY]);
            part.l[r] = rng.of(&[part.l[r], 0.0, f32::INFINITY, f32::NAN]);
        }
        if !none {
            part.acc[r * stride..][..stride].as_flattened_mut().fill_with(|| rng.value(30.0));
        }
    }
    (buffer, identity)
}

/// Copies partial results to the device, except words that an identity leaves unspecified, which must not be read.
fn put_parts(machine: &mut Machine, parts: &[(Vec<f32>, Vec<bool>)], layout: &Layout) -> u64 {
    let address = machine.memory.put(&parts.iter().flat_map(|p| &p.0).copied().collect::<Vec<_>>());
    let row = u64::from(layout.acc_rows()) * LANES as u64 * 4;
    let mut at = address;
    for (part, identity) in parts {
        for (r, _) in identity.iter().enumerate().filter(|(_, none)| **none) {
            machine.memory.forget(at + r as u64 * row, row as usize).expect("in the part");
        }
        at += part.len() as u64 * 4;
    }
    address
}

/// Merges of parts by their indices, level by level, as lists on the device: rows, joins and bounds. A launch has a block for each row.
fn put_merges(machine: &mut Machine, levels: &[&[[usize; 2]]], (rows, layout): (usize, &Layout)) -> [u64; 3] {
    let (acc_rows, head) = (layout.acc_rows(), JoinArg::MERGE);
    let at = |part: usize| (part * Partial::len(rows, acc_rows)) as u64;
    let join = |[left, right]: &[usize; 2]| JoinArg { left: at(*left), right: at(*right), acc_rows, head };
    let joins: Vec<JoinArg> = levels.concat().iter().map(join).collect();
    let bounds = (0..=levels.len()).map(|level| levels[..level].concat().len() as u32);
    let (rows, levels) = (rows as u32, levels.len() as u32);
    // Row by row backwards, each to its own place.
    let row = |row| RowArg { part: 0, rows, row, out: row, bounds: 0, levels, pad: 0 };
    let rows: Vec<RowArg> = (0..rows).rev().map(row).collect();
    let memory = &mut machine.memory;
    [memory.put(&rows), memory.put(&joins), memory.put(&bounds.collect::<Vec<_>>())]
}

/// Arguments of a kernel that joins `parts` by these lists, without maps. `end`: those of its output.
fn joining<'a>(
    layout: &'a LayoutArg,
    lists: &'a [u64; 3],
    parts: &'a u64,
    end: &[&'a [u8]],
) -> Vec<&'a [u8]> {
    let [rows, joins, bounds] = lists.each_ref().map(bytes_of);
    let (heads, work) = (bytes_of(&0u64), bytes_of(&0u64));
    [&[bytes_of(layout), rows, joins, bounds, heads, work, bytes_of(parts)], end].concat()
}

#[test]
fn merges_with_the_bits_of_the_cpu() {
    let mut machine = Machine::new(&text()).unwrap();
    let mut rng = Rng(0x3e46e);
    for (layout, rows) in layouts(&mut rng).into_iter().flat_map(|l| ROWS.map(|r| (l, r))) {
        let parts: Vec<_> = (0..7).map(|_| part(&mut rng, rows, &layout)).collect();
        let levels: [&[[usize; 2]]; 3] = [&[[0, 1], [5, 2], [3, 6]], &[[0, 5]], &[[0, 3]]];
        let address = put_parts(&mut machine, &parts, &layout);
        let lists = put_merges(&mut machine, &levels, (rows, &layout));
        let layout_arg = LayoutArg::from(layout);
        let args = joining(&layout_arg, &lists, &address, &[]);
        // Warps that have one join, two, or none.
        let threads = rng.of(&[32, 64, 128]);
        machine
            .launch("join_rows", rows as u32, threads, &args)
            .unwrap_or_else(|e| panic!("{e}, {layout:?}"));
        for lanes in Lanes::available() {
            let mut host: Vec<_> = parts.iter().map(|p| p.0.clone()).collect();
            for [left, right] in levels.concat() {
                let mut source = host[right].clone();
                let [left, right] =
                    [&mut host[left], &mut source].map(|part| Partial::new(part, rows, layout.acc_rows()));
                join(lanes, left, right);
            }
            for (i, host) in host.iter().enumerate() {
                let row = layout.acc_rows() as usize * LANES;
                let at = |word: usize| address + ((i * host.len() + word) * 4) as u64;
                // An identity's acc cannot be read, so row by row.
                let mut device = vec![f32::NAN; host.len()];
                let tail: Vec<f32> = machine.memory.read(at(rows * row), 2 * rows).unwrap();
                device[rows * row..].copy_from_slice(&tail);
                for r in (0..rows).filter(|&r| tail[r] != f32::NEG_INFINITY) {
                    let acc = machine.memory.read(at(r * row), row).unwrap();
                    device[r * row..(r + 1) * row].copy_from_slice(&acc);
                }
                if let Err(e) = same(rows, &layout, host, &device) {
                    panic!("{} lanes, part {i}, {layout:?}, {e}", lanes.name());
                }
            }
        }
        for address in lists.into_iter().chain([address]) {
            machine.memory.free(address).unwrap();
        }
    }
}

#[test]
fn finishes_with_the_bits_of_the_cpu() {
    let mut machine = Machine::new(&text()).unwrap();
    let mut rng = Rng(0xf1415);
    for (layout, rows) in layouts(&mut rng).into_iter().flat_map(|l| ROWS.map(|r| (l, r))) {
        let parts = [part(&mut rng, rows, &layout)];
        let address = put_parts(&mut machine, &parts, &layout);
        let width = layout.v_dim as usize;
        let (out, ends) = (machine.memory.allocate(rows * width * 4), machine.memory.allocate(rows * 12));
        let lists = put_merges(&mut machine, &[], (rows, &layout));
        let layout_arg = LayoutArg::from(layout);
        let args = joining(&layout_arg, &lists, &address, &[bytes_of(&out), bytes_of(&ends)]);
        machine.launch("finish_rows", rows as u32, 64, &args).unwrap_or_else(|e| panic!("{e}, {layout:?}"));
        let device: Vec<f32> = machine.memory.read(out, rows * width).unwrap();
        let device_ends: Vec<[f32; 3]> = machine.memory.read(ends, rows).unwrap();
        let mut buffer = parts[0].0.clone();
        let part = Partial::new(&mut buffer, rows, layout.acc_rows());
        for (lanes, r) in Lanes::available().flat_map(|l| (0..rows).map(move |r| (l, r))) {
            let stride = layout.acc_rows() as usize;
            let mut host = vec![f32::NAN; width];
            let acc = &part.acc[r * stride..][..stride];
            let host_lse =
                Finish { layout: &layout, m: part.m[r], l: part.l[r], acc, out: &mut host }.run(lanes);
            let what = format!("{} lanes, row {r}, {layout:?}", lanes.name());
            let ends = [host_lse, part.m[r], part.l[r]];
            assert_eq!(ends.map(bits), device_ends[r].map(bits), "lse, m and l, {what}");
            for (i, (a, b)) in host.iter().zip(&device[r * width..]).enumerate() {
                assert_eq!(bits(*a), bits(*b), "channel {i}, {what}");
            }
            if parts[0].1[r] {
                assert_eq!(host_lse, f32::NEG_INFINITY);
                assert!(host.iter().all(|x| x.to_bits() == 0));
            }
        }
        for address in lists.into_iter().chain([address, out, ends]) {
            machine.memory.free(address).unwrap();
        }
    }
}

// ---- Tokens into pages -----------------------------------------------------------------------------------------

/// An unwritten page, and the same on the device.
fn blank(machine: &mut Machine, layout: &Layout) -> (Vec<u32>, u64) {
    (vec![0xa5a5_a5a5; layout.words() as usize], machine.memory.allocate(layout.bytes() as usize))
}

/// Compares a page, of which only the given lanes were written.
fn same_page(
    machine: &Machine,
    layout: &Layout,
    host: &[u32],
    device: u64,
    lanes: &[u32],
) -> Result<(), String> {
    let word = |at: usize| machine.memory.read::<u32>(device + at as u64 * 4, 1);
    for (at, want) in host.iter().enumerate() {
        let v = at.checked_sub(layout.v_base() as usize);
        let lane = v.map_or(at % LANES, |v| v / layout.v_stride() as usize) as u32;
        match (lanes.contains(&lane), word(at)) {
            (true, Ok(got)) if got[0] == *want => {}
            (false, Err(Cause::Uninitialised { .. })) => {}
            (_, got) => return Err(format!("word {at} of lane {lane} is {got:?}, not {want:#x}")),
        }
    }
    Ok(())
}

#[test]
fn appends_and_copies_with_the_bits_of_the_cpu() {
    let mut machine = Machine::new(&text()).unwrap();
    let mut rng = Rng(0x57043);
    for layout in (0..2).flat_map(|_| layouts(&mut rng)).collect::<Vec<_>>() {
        let what = format!("{layout:?}");
        let (k_dim, v_dim) = (layout.k_dim as usize, layout.v_dim as usize);
        let (k, v) = (rng.values(9 * k_dim, 2.0), rng.values(9 * v_dim, 1e-6));
        let mut pages = [blank(&mut machine, &layout), blank(&mut machine, &layout)];
        let mut writes = Vec::new();
        let lanes: [Vec<u32>; 2] = [vec![0, 1, 2, 31], vec![7, 8, 30]];
        for (page, lanes) in pages.iter_mut().zip(&lanes) {
            for &lane in lanes {
                let row = rng.below(9);
                let (key, value) = (&k[row as usize * k_dim..], &v[row as usize * v_dim..]);
                layout.write(&mut page.0, lane, Position(928 + lane), key, value).expect("finite");
                writes.push(WriteArg { page: page.1, position: 928 + lane, row });
            }
        }
        let layout_arg = LayoutArg::from(layout);
        let (k_host, v_host) = (k[..k_dim].to_vec(), v[..v_dim].to_vec());
        let (k, v, list) = (machine.memory.put(&k), machine.memory.put(&v), machine.memory.put(&writes));
        let count = writes.len() as u32;
        let tokens = [bytes_of(&layout_arg), bytes_of(&k), bytes_of(&v), bytes_of(&list), bytes_of(&count)];
        let none = [bytes_of(&0u64), bytes_of(&0u32)];
        machine
            .launch("append", 2, 128, &[&tokens[..], &none].concat())
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        for (page, lanes) in pages.iter().zip(&lanes) {
            same_page(&machine, &layout, &page.0, page.1, lanes).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        // Lanes of both pages to one, in other places.
        let mut target = blank(&mut machine, &layout);
        let mut copies = Vec::new();
        for (page, from, to) in [(0, 31, 0), (1, 7, 1), (0, 1, 2), (1, 30, 19)] {
            layout.copy(&pages[page].0, from, &mut target.0, to);
            copies.push(CopyArg { source: pages[page].1, target: target.1, from, to });
        }
        let copies = machine.memory.put(&copies);
        let args: &[&[u8]] = &[bytes_of(&layout_arg), bytes_of(&copies), bytes_of(&4u32)];
        machine.launch("copy_tokens", 1, 128, args).unwrap_or_else(|e| panic!("{what}: {e}"));
        same_page(&machine, &layout, &target.0, target.1, &[0, 1, 2, 19])
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        // A lane of each page, and copies of other lanes of them, in one launch.
        let mut also = blank(&mut machine, &layout);
        for (from, to) in [(2, 3), (0, 30)] {
            layout.copy(&pages[0].0, from, &mut also.0, to);
        }
        let other =
            [(2, 3), (0, 30)].map(|(from, to)| CopyArg { source: pages[0].1, target: also.1, from, to });
        let other = machine.memory.put(&other);
        for page in &mut pages {
            layout.write(&mut page.0, 11, Position(939), &k_host, &v_host).expect("finite");
        }
        let write = |page: &(Vec<u32>, u64)| WriteArg { page: page.1, position: 939, row: 0 };
        let writes = machine.memory.put(&pages.each_ref().map(write));
        let tokens = [bytes_of(&layout_arg), bytes_of(&k), bytes_of(&v), bytes_of(&writes), bytes_of(&2u32)];
        let copied = [bytes_of(&other), bytes_of(&2u32)];
        machine
            .launch("append", 2, 96, &[&tokens[..], &copied].concat())
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        let written = [&lanes[0], &[11][..]].concat();
        let found = same_page(&machine, &layout, &pages[0].0, pages[0].1, &written);
        found
            .and_then(|()| same_page(&machine, &layout, &also.0, also.1, &[3, 30]))
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        for address in [k, v, list, copies, other, writes, pages[0].1, pages[1].1, target.1, also.1] {
            machine.memory.free(address).unwrap();
        }
    }
    for entry in ["append", "copy_tokens"] {
        let (idle, of) = machine.program.idle(entry);
        assert!(idle.len() * 6 < of, "{entry}: of {of} instructions nothing ran {idle:?}");
    }
}

// ---- The checks ------------------------------------------------------------------------------------------------

/// A kernel of one pointer: `%rd1`, and the lane in `%r1`.
fn tiny(body: &str) -> String {
    format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(\n\t.param .u64 k_param_0\n)\n{{\n\
         \t.reg .pred %p<9>;\n\t.reg .b16 %rs<9>;\n\t.reg .b32 %r<9>;\n\t.reg .b64 %rd<9>;\n\tld.param.b64 %rd1, [k_param_0];\n\
         \tmov.u32 %r1, %tid.x;\n\tmul.wide.u32 %rd2, %r1, 4;\n\tadd.s64 %rd3, %rd1, %rd2;\n{body}\n\tret;\n}}\n"
    )
}

/// Runs `body` on `words`, with that many threads.
fn run_tiny(body: &str, words: &[u32], threads: u32) -> Result<Vec<u32>, Fault> {
    run_blocks(body, words, 1, threads)
}

/// [`run_tiny`] with several blocks.
fn run_blocks(body: &str, words: &[u32], blocks: u32, threads: u32) -> Result<Vec<u32>, Fault> {
    let mut machine = Machine::new(&tiny(body)).unwrap();
    machine.program.budget = 10_000;
    let address = machine.memory.put(words);
    machine.launch("k", blocks, threads, &[bytes_of(&address)])?;
    Ok(machine.memory.read(address, words.len()).unwrap())
}

fn cause(body: &str, words: &[u32], threads: u32) -> (String, u32, Cause) {
    let fault = run_tiny(body, words, threads).expect_err("it must fail");
    assert!(fault.line > 13, "{fault}");
    (fault.opcode, fault.lane, fault.cause)
}

#[test]
fn runs_lanes_that_part_and_meet() {
    // Each lane loops as often as its index, then all shuffle.
    let body = "mov.b32 %r2, 0;\n mov.b32 %r3, 0;\nL:\n setp.ge.u32 %p1, %r2, %r1;\n @%p1 bra M;\n add.s32 %r3, %r3, %r2;\n
        add.s32 %r2, %r2, 1;\n bra.uni L;\nM:\n shfl.sync.bfly.b32 %r4|%p2, %r3, 1, 31, -1;\n st.global.b32 [%rd3], %r4;";
    let out = run_tiny(body, &[0; 32], 32).unwrap();
    assert_eq!(out, Vec::from_iter((0..32u32).map(|i| i ^ 1).map(|i| i * i.saturating_sub(1) / 2)));
    // The same with the loop placed after the code that follows it.
    let body = "mov.b32 %r2, 0;\n mov.b32 %r3, 0;\n bra.uni L;\nM:\n shfl.sync.idx.b32 %r4, %r3, 31, 31, -1;\n
        st.global.b32 [%rd3], %r4;\n ret;\nL:\n setp.ge.u32 %p1, %r2, %r1;\n @%p1 bra M;\n add.s32 %r3, %r3, %r2;\n
        add.s32 %r2, %r2, 1;\n bra.uni L;";
    assert_eq!(run_tiny(body, &[0; 32], 32).unwrap(), [465; 32]);
}

#[test]
fn finds_divergent_operations() {
    let parted = "setp.lt.u32 %p1, %r1, 5;\n @%p1 bra A;\n";
    for op in
        ["shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1", "vote.sync.ballot.b32 %r2, %p1, -1", "bar.warp.sync -1"]
    {
        // One copy on either side, as jump threading would have it.
        let (opcode, _, cause) = cause(&format!("{parted} {op};\n bra.uni B;\nA:\n {op};\nB:"), &[0], 32);
        assert!(op.starts_with(&opcode), "{opcode}");
        assert_eq!(cause, Cause::Divergent { missing: 0x1f });
    }
    // Lanes that have exited do not rejoin.
    let fault = cause(&format!("{parted} bar.warp.sync -1;\nA:"), &[0], 32);
    assert_eq!(fault, ("bar.warp.sync".into(), 5, Cause::Divergent { missing: 0x1f }));
    // A lane outside the mask that it names.
    let fault = cause("bar.warp.sync 0x7fffffff;", &[0], 32);
    assert!(matches!(fault.2, Cause::Divergent { .. }));
    let fault = cause(
        "setp.lt.u32 %p1, %r1, 16;\n @%p1 bra A;\n ret;\nA:\n shfl.sync.idx.b32 %r2, %r1, 16, 31, 0xffff;",
        &[0],
        32,
    );
    assert_eq!(fault.2, Cause::AbsentLane { source: 16 });
}

#[test]
fn finds_accesses_out_of_place() {
    let address = |x: &Cause| match *x {
        Cause::OutOfBounds { address } | Cause::Misaligned { address } | Cause::Uninitialised { address } => {
            address as u32
        }
        ref other => panic!("{other:?}"),
    };
    let load = "ld.global.b32 %r2, [%rd3];";
    assert!(run_tiny(load, &[0; 32], 32).is_ok());
    let (opcode, lane, cause_) = cause(load, &[0; 31], 32);
    assert_eq!((opcode.as_str(), lane, address(&cause_)), ("ld.global.b32", 31, 124));
    let (opcode, lane, cause_) = cause("st.global.b32 [%rd3], %r1;", &[0; 31], 32);
    assert_eq!((opcode.as_str(), lane, address(&cause_)), ("st.global.b32", 31, 124));
    let (_, lane, cause_) = cause("ld.global.v2.b32 {%r2, %r3}, [%rd3];", &[0; 64], 32);
    assert_eq!((lane, address(&cause_)), (1, 4));
    assert!(matches!(cause_, Cause::Misaligned { .. }));
    // Local memory is not global memory, and ends.
    let depot = ".local .align 8 .b8 d[8];\n mov.b64 %rd4, d;\n";
    assert!(run_tiny(&format!("{depot} st.local.b64 [%rd4], 7;\n ld.b32 %r2, [%rd4+4];"), &[0], 32).is_ok());
    let (_, _, c) = cause(&format!("{depot} ld.local.b32 %r2, [%rd4+4];"), &[0], 32);
    assert!(matches!(c, Cause::Uninitialised { .. }));
    let (_, _, c) = cause(&format!("{depot} st.local.b32 [%rd4+8], 0;"), &[0], 32);
    assert!(matches!(c, Cause::OutOfBounds { .. }));
    let (_, _, c) = cause(&format!("{depot} st.global.b32 [%rd4], 0;"), &[0], 32);
    assert!(matches!(c, Cause::OutOfBounds { .. }));
    // Global memory that was never written, or was freed.
    let mut machine = Machine::new(&tiny(load)).unwrap();
    let at = machine.memory.allocate(128);
    machine.memory.write(at, &[1u32; 16]).unwrap();
    machine.memory.write(at + 68, &[1u32; 15]).unwrap();
    let fault = machine.launch("k", 1, 32, &[bytes_of(&at)]).unwrap_err();
    assert_eq!((fault.lane, fault.cause), (16, Cause::Uninitialised { address: at + 64 }));
    machine.memory.write(at, &[1u32; 32]).unwrap();
    machine.launch("k", 1, 32, &[bytes_of(&at)]).unwrap();
    machine.memory.free(at).unwrap();
    let fault = machine.launch("k", 1, 32, &[bytes_of(&at)]).unwrap_err();
    assert_eq!(fault.cause, Cause::Freed { address: at });
    assert_eq!(machine.memory.free(at), Err(Cause::Freed { address: at }));
}

#[test]
fn finds_races() {
    let to_first = |x: Cause| match x {
        Cause::WarpRace { address, other } => (address as u32, other),
        other => panic!("{other:?}"),
    };
    // All write the same to one word: a race of two warps, not of the lanes of one.
    let same = "mov.b32 %r2, 7;\n st.global.b32 [%rd1], %r2;";
    assert_eq!(run_tiny(same, &[0], 32).unwrap(), [7]);
    assert_eq!(to_first(cause(same, &[0], 64).2), (0, 0));
    assert!(matches!(cause("st.global.b32 [%rd1], %r1;", &[0], 32).2, Cause::LaneRace { .. }));
    // One warp reads a word that another wrote, or writes one that another read.
    let read =
        "setp.lt.u32 %p1, %r1, 32;\n @%p1 st.global.b32 [%rd3], 1;\n @!%p1 ld.global.b32 %r2, [%rd3+-128];";
    assert_eq!(to_first(cause(read, &[0; 64], 64).2), (0, 0));
    let write =
        "setp.lt.u32 %p1, %r1, 32;\n @%p1 ld.global.b32 %r2, [%rd3];\n @!%p1 st.global.b32 [%rd3+-128], 1;";
    assert_eq!(to_first(cause(write, &[0; 64], 64).2), (0, 0));
    // A barrier of the block stands between the two warps, but not between two blocks.
    for both in [read, write] {
        let (first, second) = both.split_once("\n @!%p1").unwrap();
        let apart = format!("{first}\n bar.sync 0;\n @!%p1{second}");
        assert!(run_tiny(&apart, &[0; 64], 64).is_ok());
        let blocks =
            apart.replace("setp.lt.u32 %p1, %r1, 32;", "mov.b32 %r5, %ctaid.x;\n setp.lt.u32 %p1, %r5, 1;");
        let fault = run_blocks(&blocks.replace("+-128", ""), &[0; 32], 2, 32).unwrap_err();
        assert_eq!(to_first(fault.cause), (0, 0));
        // A third access, of the first warp again, needs a second barrier.
        let third = format!("{apart}\n @%p1 st.global.b32 [%rd3], 2;");
        assert_eq!(to_first(cause(&third, &[0; 64], 64).2), (0, 0));
        let third = format!("{apart}\n bar.sync 0;\n @%p1 st.global.b32 [%rd3], 2;");
        assert!(run_tiny(&third, &[0; 64], 64).is_ok());
    }
    // Both warps read, and one of them writes: after a barrier only.
    let many = "and.b64 %rd4, %rd2, 124;\n add.s64 %rd4, %rd1, %rd4;\n ld.global.b32 %r2, [%rd4];";
    let then = "setp.lt.u32 %p1, %r1, 32;\n @%p1 st.global.b32 [%rd3], 1;";
    assert!(matches!(cause(&format!("{then}\n {many}"), &[0; 64], 64).2, Cause::WarpRace { other: 0, .. }));
    assert!(run_tiny(&format!("{many}\n bar.sync 0;\n {then}"), &[0; 64], 64).is_ok());
    // A warp, or lanes of one, that do not come.
    let gone = |lanes: u32| format!("setp.lt.u32 %p1, %r1, {lanes};\n @%p1 ret;\n bar.sync 0;");
    assert_eq!(cause(&gone(32), &[0], 64).2, Cause::Deserted { other: 0 });
    assert_eq!(cause(&gone(16), &[0], 32).2, Cause::Divergent { missing: 0xffff });
    // A lane reads a word that another wrote, with a barrier in between and without; and writes a word that another read.
    for (first, then) in [
        ("st.global.b32 [%rd3], %r1;", "xor.b64 %rd4, %rd3, 4;\n ld.global.b32 %r2, [%rd4];"),
        ("xor.b64 %rd4, %rd3, 4;\n ld.global.b32 %r2, [%rd4];", "st.global.b32 [%rd3], 9;"),
    ] {
        assert!(run_tiny(&format!("{first}\n bar.warp.sync -1;\n {then}"), &[0; 32], 32).is_ok());
        let (_, _, cause) = cause(&format!("{first}\n {then}"), &[0; 32], 32);
        assert!(matches!(cause, Cause::LaneRace { .. }));
    }
    // All lanes write the same that they have read, in one instruction: without a barrier before it, this is a race too.
    let (first, then) = ("ld.global.b32 %r2, [%rd1];", "st.global.b32 [%rd1], 5;");
    assert_eq!(run_tiny(&format!("{first}\n bar.warp.sync -1;\n {then}"), &[5], 32).unwrap(), [5]);
    assert!(matches!(cause(&format!("{first}\n {then}"), &[5], 32).2, Cause::LaneRace { .. }));
    // Halves of a word are apart, of two lanes and of two warps; one half is not.
    let at = |bytes: &str| {
        format!("add.s64 %rd4, %rd1, {bytes};\n cvt.u16.u32 %rs1, %r1;\n st.global.b16 [%rd4+2], %rs1;")
    };
    let own = format!("shr.u64 %rd5, %rd2, 1;\n {}", at("%rd5"));
    let out = run_tiny(&own, &[0; 33], 64).unwrap();
    assert!((1..32).all(|i| out[i] == (2 * i as u32 - 1) | (2 * i as u32) << 16), "{out:?}");
    assert!(matches!(cause(&at("0"), &[0; 32], 32).2, Cause::LaneRace { .. }));
}

#[test]
fn atomic_minima_meet_each_other_and_nobody_else() {
    let least = "sub.s32 %r2, 40, %r1;\n cvt.u64.u32 %rd4, %r2;\n atom.global.min.u64 %rd5, [%rd1], %rd4;";
    // 32 lanes, and the lanes of two warps, of which some numbers wrap round to large ones.
    assert_eq!(run_tiny(least, &[u32::MAX; 2], 32).unwrap(), [9, 0]);
    let from_63 = least.replace("40", "70");
    assert_eq!(run_tiny(&from_63, &[u32::MAX; 2], 64).unwrap(), [7, 0]);
    for plain in ["st.global.b32 [%rd1], 3;", "ld.global.b32 %r3, [%rd1];"] {
        for both in [format!("{least}\n {plain}"), format!("{plain}\n bar.warp.sync -1;\n {least}")] {
            assert!(matches!(cause(&both, &[u32::MAX; 2], 32).2, Cause::WarpRace { .. }), "{both}");
        }
    }
    let (_, _, apart) = cause(&least.replace("[%rd1]", "[%rd1+4]"), &[u32::MAX; 4], 32);
    assert!(matches!(apart, Cause::Misaligned { .. }));
    // Sums, with a carry into the upper half, also by an address of no space.
    for sum in ["atom.global.add.u64", "atom.add.u64"] {
        let sum = least.replace("atom.global.min.u64", sum);
        assert_eq!(run_tiny(&sum, &[u32::MAX, 3], 32).unwrap(), [(40 * 32 - 31 * 16) - 1, 4]);
    }
}

#[test]
fn checks_shared_memory() {
    // Each thread its own word, and the address by either name.
    let own = ".shared .align 8 .b8 s[256];\n cvta.shared.u64 %rd4, s;\n add.s64 %rd5, %rd4, %rd2;\n";
    let (store, load) = ("st.b32 [%rd5], %r1;", "ld.shared.b32 %r2, [%rd5];\n st.global.b32 [%rd3], %r2;");
    let out = run_tiny(&format!("{own} {store}\n {load}"), &[0; 64], 64).unwrap();
    assert_eq!(out, Vec::from_iter(0..64));
    // Never written; past the end; not global memory, nor shared memory used as such.
    let (_, lane, c) =
        cause(&format!("{own} setp.ne.u32 %p1, %r1, 3;\n @%p1 {store}\n {load}"), &[0; 64], 64);
    assert!(matches!(c, Cause::Uninitialised { .. }) && lane == 3, "{lane}, {c:?}");
    for beyond in ["st.b32 [%rd5+128], 0;", "st.global.b32 [%rd5], 0;", "st.shared.b32 [%rd3], 0;"] {
        let (_, _, c) = cause(&format!("{own} {beyond}"), &[0; 64], 64);
        assert!(matches!(c, Cause::OutOfBounds { .. }), "{beyond}: {c:?}");
    }
    // Lanes of a warp, and the warps of a block.
    let (_, _, c) = cause(&format!("{own} st.shared.b32 [%rd4], %r1;"), &[0; 32], 32);
    assert!(matches!(c, Cause::LaneRace { .. }));
    let (_, _, c) = cause(&format!("{own} st.shared.b32 [%rd4], 7;"), &[0; 64], 64);
    assert!(matches!(c, Cause::WarpRace { other: 0, .. }));
    // Another block has its own, of which it knows nothing.
    let text =
        tiny(&format!("{own} mov.u32 %r3, %ctaid.x;\n setp.eq.u32 %p1, %r3, 0;\n @%p1 {store}\n {load}"));
    let mut machine = Machine::new(&text).unwrap();
    let at = machine.memory.put(&[0u32; 64]);
    machine.launch("k", 1, 32, &[bytes_of(&at)]).unwrap();
    let fault = machine.launch("k", 2, 32, &[bytes_of(&at)]).unwrap_err();
    assert!(fault.warp == 1 && matches!(fault.cause, Cause::Uninitialised { .. }), "{fault}");
    let error = Machine::new(&tiny(".shared .align 8 .b8 s[49153];")).unwrap_err();
    assert!(error.what.contains("49152"), "{error}");
}

#[test]
fn finds_traps_hangs_and_what_it_does_not_know() {
    assert_eq!(cause("setp.eq.s32 %p1, %r1, 9;\n @%p1 trap;", &[0], 32).1, 9);
    assert_eq!(cause("L:\n bra.uni L;", &[0], 32), ("bra.uni".into(), 0, Cause::Budget));
    assert_eq!(cause("mov.b32 %r2, 0;\n div.u32 %r3, %r1, %r2;", &[0], 32).2, Cause::DivideByZero);
    for unknown in [
        "ex2.approx.f32 %r1, %r1;",
        "add.f32 %r1, %r1, %r1;",
        "fma.rn.ftz.f32 %r1, %r1, %r1, %r1;",
        "mul.rn.f32 %r1, %rd1, %r1;",
        "add.s32 %r1, %r1;",
        "add.s32 %r1, %r1, %q1;",
        "call.uni f, ();",
        "bra L;",
        ".shared .b8 x[4];",
    ] {
        let error = Machine::new(&tiny(unknown)).unwrap_err();
        assert_eq!(error.line, 16, "{error}");
    }
    let error = Machine::new(".version 7.0\n.extern .func f();\n").unwrap_err();
    assert_eq!(error.line, 2);
    let mut machine = Machine::new(&tiny("")).unwrap();
    for (entry, block, args) in [("k", 32, &[] as &[&[u8]]), ("j", 32, &[&[0; 8]]), ("k", 16, &[&[0; 8]])] {
        let fault = machine.launch(entry, 1, block, args).unwrap_err();
        assert!(matches!(fault.cause, Cause::Launch(_)));
    }
}

#[test]
fn computes_as_the_instruction_set_says() {
    // Each is (instruction on %r2 and %r3, their bits, the result in %r4).
    let f = f32::to_bits;
    for (op, a, b, expected) in [
        ("add.rn.f32 %r4, %r2, %r3", f(f32::INFINITY), f(f32::NEG_INFINITY), 0x7fff_ffff),
        ("max.f32 %r4, %r2, %r3", f(f32::NAN), f(-1.0), f(-1.0)),
        ("max.f32 %r4, %r2, %r3", f(-0.0), f(0.0), f(0.0)),
        ("min.f32 %r4, %r2, %r3", f(0.0), f(-0.0), f(-0.0)),
        ("min.f32 %r4, %r2, %r3", f(2.0), f(-1.0), f(-1.0)),
        ("rcp.rn.f32 %r4, %r2", f(3.0), 0, 0x3eaa_aaab),
        ("rcp.rn.f32 %r4, %r2", f(-0.0), 0, f(f32::NEG_INFINITY)),
        ("cvt.rzi.s32.f32 %r4, %r2", f(f32::NAN), 0, 0),
        ("cvt.rzi.s32.f32 %r4, %r2", f(-3e9), 0, 1 << 31),
        ("cvt.rzi.s32.f32 %r4, %r2", f(-1.9), 0, u32::MAX),
        ("cvt.rn.f32.s32 %r4, %r2", -16_777_217i32 as u32, 0, f(-16_777_216.0)),
        ("mul.rn.f32 %r4, %r2, %r3", f(f32::MIN_POSITIVE), f(0.5), 1 << 22),
        ("fma.rn.f32 %r4, %r2, %r2, %r3", 0x3f80_0800, 0xbf80_1000, 0x3380_0000),
        ("shl.b32 %r4, %r2, %r3", 1, 32, 0),
        (
            ".reg .b64 %x<4>;\n cvt.u64.u32 %x0, %r2;\n cvt.u64.u32 %x1, %r3;\n shl.b64 %x2, %x1, 32;\n \
             or.b64 %x3, %x0, %x2;\n bfe.u64 %x0, %x3, 28, 8;\n cvt.u32.u64 %r4, %x0",
            0xa123_4567,
            0xffff_fff5,
            0x5a,
        ),
        (
            ".reg .b16 %rs<2>;\n cvt.u16.u32 %rs0, %r2;\n shl.b16 %rs1, %rs0, %r3;\n cvt.u32.u16 %r4, %rs1",
            0x8001,
            4,
            0x10,
        ),
        (
            ".reg .b16 %rs<2>;\n cvt.u16.u32 %rs0, %r2;\n setp.gt.s16 %p1, %rs0, 2;\n selp.b32 %r4, 1, 0, %p1",
            0x8003,
            0,
            0,
        ),
        (
            ".reg .b16 %rs<2>;\n cvt.u16.u32 %rs0, %r2;\n add.s16 %rs1, %rs0, -3;\n cvt.u32.u16 %r4, %rs1",
            1,
            0,
            0xfffe,
        ),
        (
            ".reg .b16 %rs<2>;\n cvt.u16.u32 %rs0, %r2;\n mul.lo.s16 %rs1, %rs0, 3;\n cvt.u32.u16 %r4, %rs1",
            0x8001,
            0,
            0x8003,
        ),
        (
            ".reg .b16 %rs<2>;\n cvt.u16.u32 %rs0, %r2;\n div.u16 %rs1, %rs0, 3;\n cvt.u32.u16 %r4, %rs1",
            0x1_ffff,
            0,
            0x5555,
        ),
        (
            ".reg .b16 %rs<2>;\n cvt.u64.u32 %rd4, %r2;\n cvt.u16.u64 %rs1, %rd4;\n cvt.u32.u16 %r4, %rs1",
            0x1_2345,
            0,
            0x2345,
        ),
        ("shr.u32 %r4, %r2, %r3", u32::MAX, 32, 0),
        ("shr.s32 %r4, %r2, %r3", 1 << 31, 77, u32::MAX),
        ("bfe.u32 %r4, %r2, %r3, 8", 0xabcd_1234, 8, 0x12),
        ("bfe.s32 %r4, %r2, %r3, 8", 0xabcd_1234, 8, 0x12),
        ("bfe.s32 %r4, %r2, %r3, 8", 0xabcd_1234, 16, 0xffff_ffcd),
        ("bfe.s32 %r4, %r2, %r3, 1", 0x0000_0200, 9, u32::MAX),
        ("bfe.s32 %r4, %r2, %r3, 0", u32::MAX, 4, 0),
        ("bfe.s32 %r4, %r2, %r3, 8", 0xabcd_1234, 28, 0xffff_fffa),
        ("bfe.s32 %r4, %r2, %r3, 8", 0x4bcd_1234, 40, 0),
        ("shf.l.wrap.b32 %r4, %r2, %r3, 40", 0x1200_0000, 0xab, 0xab12),
        ("not.b32 %r4, %r2", 5, 0, !5),
        ("popc.b32 %r4, %r2", 0xf0f0, 0, 8),
        ("clz.b32 %r4, %r2", 0, 0, 32),
        ("setp.ltu.f32 %p1, %r2, %r3;\n selp.b32 %r4, 1, 0, %p1", f(f32::NAN), 0, 1),
        ("setp.lt.f32 %p1, %r2, %r3;\n selp.b32 %r4, 1, 0, %p1", f(f32::NAN), 0, 0),
        ("setp.ne.f32 %p1, %r2, %r3;\n selp.b32 %r4, 1, 0, %p1", f(f32::NAN), 0, 0),
        ("setp.neu.f32 %p1, %r2, %r3;\n selp.b32 %r4, 1, 0, %p1", f(f32::NAN), 0, 1),
        ("setp.leu.f32 %p1, %r2, %r3;\n selp.b32 %r4, 1, 0, %p1", f(0.0), f(-0.0), 1),
        ("setp.nan.f32 %p1, %r2, %r2;\n selp.b32 %r4, 1, 0, %p1", f(1.0), 0, 0),
        ("mov.pred %p1, -1;\n mov.pred %p2, 0;\n xor.pred %p1, %p1, %p2;\n selp.b32 %r4, 1, 0, %p1", 0, 0, 1),
        ("setp.lt.s32 %p1, %r2, %r3;\n selp.b32 %r4, 1, 0, %p1", u32::MAX, 0, 1),
        ("setp.lt.u32 %p1, %r2, %r3;\n selp.b32 %r4, 1, 0, %p1", u32::MAX, 0, 0),
        (
            "cvt.u64.u32 %rd4, %r2;\n shl.b64 %rd4, %rd4, 36;\n shr.s64 %rd4, %rd4, 60;\n cvt.u32.u64 %r4, %rd4",
            1 << 27,
            0,
            !7,
        ),
        (
            "cvt.rn.f64.u32 %rd4, %r2;\n cvt.rn.f64.u32 %rd5, %r3;\n div.rn.f64 %rd4, %rd4, %rd5;\n cvt.rn.f32.f64 %r4, %rd4",
            3,
            7,
            f(3.0 / 7.0),
        ),
        ("mov.b64 %rd4, {%r2, %r3};\n cvt.rn.f64.u64 %rd4, %rd4;\n mov.b64 {%r4, %r5}, %rd4", 1, 1 << 21, 0),
        ("mov.b64 %rd4, {%r2, %r3};\n cvt.rn.f32.u64 %r4, %rd4", 1, 1, f(4_294_967_296.0)),
        (
            "cvt.rn.f64.u32 %rd4, %r2;\n mul.rn.f64 %rd4, %rd4, 0d3FE0000000000000;\n cvt.rn.f32.f64 %r4, %rd4",
            0x0200_0002,
            0,
            f(16_777_216.0),
        ),
        (
            "setp.eq.u32 %p1, %r2, 5;\n cvt.rn.f64.u32 %rd4, %r3;\n selp.f64 %rd4, 0d3FF0000000000000, %rd4, %p1;\n cvt.rn.f32.f64 %r4, %rd4",
            5,
            9,
            f(1.0),
        ),
        ("mov.b64 %rd4, {%r2, %r3};\n neg.s64 %rd4, %rd4;\n mov.b64 {%r5, %r4}, %rd4", 1, 2, !2),
        (
            "mad.wide.s32 %rd4, %r2, %r3, 1;\n shr.u64 %rd4, %rd4, 32;\n cvt.u32.u64 %r4, %rd4",
            u32::MAX,
            2,
            u32::MAX,
        ),
        ("shfl.sync.up.b32 %r4, %r1, 1, 0, -1;\n shfl.sync.idx.b32 %r4, %r4, 7, 31, -1", 0, 0, 6),
        ("shfl.sync.down.b32 %r4|%p1, %r1, 30, 31, -1;\n vote.sync.ballot.b32 %r4, %p1, -1", 0, 0, 3),
        ("shfl.sync.idx.b32 %r4, %r1, 1, 0x181f, -1;\n shfl.sync.idx.b32 %r4, %r4, 29, 31, -1", 0, 0, 25),
    ] {
        let body = format!(
            "ld.global.v2.b32 {{%r2, %r3}}, [%rd1];\n {op};\n bar.warp.sync -1;\n st.global.b32 [%rd1], %r4;"
        );
        assert_eq!(run_tiny(&body, &[a, b], 32).expect(op)[0], expected, "{op}");
    }
}

#[test]
fn a_shuffle_of_other_lanes_shows() {
    let text = text();
    let from = text.find(".entry attend_r1(").unwrap();
    let end = from + text[from..].find("\n}").unwrap();
    // The sum is the last butterfly of the kernel: at its first step each lane takes its neighbour's partner.
    let at = from + text[from..end].rfind(", 16, 31, -1;").unwrap();
    assert!(text[..at].rsplit('\n').next().unwrap().contains("shfl.sync.bfly.b32"));
    let wrong = format!("{}, 17, 31, -1;{}", &text[..at], &text[at + ", 16, 31, -1;".len()..]);
    let (mut right, mut wrong) = (Machine::new(&text).unwrap(), Machine::new(&wrong).unwrap());
    let mut rng = Rng(5);
    let mut found = 0;
    for _ in 0..10 {
        let case = Case::new(&mut rng, 1, Layout::new(32, Dtype::Bf16).values(32, Dtype::F16));
        let host = case.host(Lanes::detect());
        case.same(&host, &case.device(&mut right, 32).unwrap()).unwrap();
        let device = case.device(&mut wrong, 32).unwrap();
        found += u32::from(case.same(&host, &device).is_err());
    }
    assert!(found > 0);
}

#[test]
fn finds_pages_that_are_not_as_promised() {
    let mut machine = Machine::new(&text()).unwrap();
    let layout = Layout::new(32, Dtype::F32);
    let mut rng = Rng(9);
    let mut case = Case::new(&mut rng, 1, layout);
    case.blocks = vec![(0..3).map(|i| page(&mut rng, &layout, i * 32, 32)).collect()];
    case.sights = vec![Sight { floor: 0, lo: 0, sinks: 0, hi: 95 }];
    (case.rope, case.table) = (None, Vec::new());
    let end = u64::from(layout.words()) * 4;
    case.device(&mut machine, 32).unwrap();
    let mut last = 0;
    let fault = case.device_with(&mut machine, 32, |memory, pages| {
        last = pages[2];
        memory.forget(last + end - 4, 4).unwrap();
    });
    let fault = fault.unwrap_err();
    assert_eq!((fault.lane, fault.cause), (31, Cause::Uninitialised { address: last + end - 4 }));
    let fault = case.device_with(&mut machine, 32, |memory, pages| {
        last = pages[1];
        memory.free(last).unwrap();
    });
    assert_eq!(fault.unwrap_err().cause, Cause::Freed { address: last });
    case.blocks[0][2].words.pop();
    let fault = case.device_with(&mut machine, 32, |_, pages| last = pages[2]).unwrap_err();
    assert_eq!((fault.lane, fault.cause), (31, Cause::OutOfBounds { address: last + end - 4 }));
}

#[test]
fn a_merge_without_its_barrier_races() {
    let text = text().replace("bar.warp.sync", "// bar.warp.sync");
    let mut machine = Machine::new(&text).unwrap();
    // The right part changes the exponent and the sum of the left one, or is too small to.
    for right in [4.0, -200.0] {
        let mut parts = [[1.0f32; 34]; 2];
        (parts[0][32], parts[1][32]) = (3.0, right);
        let address = machine.memory.put(parts.as_flattened());
        let layout = Layout::new(1, Dtype::F32);
        let lists = put_merges(&mut machine, &[&[[0, 1]]], (1, &layout));
        let layout = LayoutArg::from(layout);
        let fault = machine.launch("join_rows", 1, 32, &joining(&layout, &lists, &address, &[])).unwrap_err();
        assert_eq!(fault.opcode, "st.global.b32");
        assert!(matches!(fault.cause, Cause::LaneRace { .. }));
    }
}

#[test]
fn levels_without_their_barrier_race() {
    let text = text();
    let layout = Layout::new(1, Dtype::F32);
    let run = |text: &str| {
        let mut machine = Machine::new(text).unwrap();
        let address = machine.memory.put([[1.0f32; 34]; 4].as_flattened());
        let levels: [&[[usize; 2]]; 2] = [&[[0, 1], [2, 3]], &[[0, 2]]];
        let lists = put_merges(&mut machine, &levels, (1, &layout));
        let layout = LayoutArg::from(layout);
        machine.launch("join_rows", 1, 64, &joining(&layout, &lists, &address, &[]))
    };
    run(&text).unwrap();
    let fault = run(&text.replace("bar.sync", "// bar.sync")).unwrap_err();
    assert!(matches!(fault.cause, Cause::WarpRace { .. }), "{fault}");
}
