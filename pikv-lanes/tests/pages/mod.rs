//! Blocks of pages with made-up keys and values, in every form, and attention over them.

use pikv_core::attend::{BLOCK, Sight};
use pikv_core::codec::{code::Code, packed::Packed, read::PackedRef};
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::warp::LANES;
use pikv_core::{dtype::Dtype, hash, page::Layout, page::Position};
use pikv_lanes::attend::{Block, Common, PACKED_ROWS, PackedBlock, bundles};
use pikv_lanes::pack::{self, Channels};
use pikv_lanes::tile::Tile;
use pikv_lanes::{Lanes, merge};

/// Channels of a head.
pub const DIM: u32 = 128;

/// How the tokens of a page are stored.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    /// A full page in this dtype.
    Full(Dtype),
    /// A packed page, K and V in this code.
    Packed(Code),
}

impl Form {
    /// All dtypes of full pages, and all codes.
    pub fn all() -> impl Iterator<Item = Form> {
        Dtype::ALL.into_iter().map(Form::Full).chain(Code::ALL.into_iter().map(Form::Packed))
    }

    /// Name of the dtype or code.
    pub fn name(self) -> &'static str {
        match self {
            Form::Full(dtype) => dtype.name(),
            Form::Packed(code) => code.name(),
        }
    }
}

/// Numbers in [-1, 1) of 24 bits, the same on every machine for the same `seed`.
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    (0..n).map(|_| (hash::next(&mut state) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// One number for the bits of `values`.
pub fn bits(values: &[f32]) -> u64 {
    values.iter().fold(0, |sum, x| hash::mix(sum ^ u64::from(x.to_bits())))
}

/// The pages of a block.
pub struct Pages {
    layout: Layout,
    packed: Option<Packed>,
    words: Vec<Vec<u32>>,
}

impl Pages {
    /// A whole block in `form`, packed on `lanes`.
    pub fn new(form: Form, lanes: Lanes) -> Pages {
        let (dtype, packed) = match form {
            Form::Full(dtype) => (dtype, None),
            Form::Packed(code) => (Dtype::F32, Some(Packed::new(DIM, DIM, code, code))),
        };
        let layout = Layout::new(DIM, dtype);
        let page = |i: u64| {
            let (k, v) = (noise(2 * i, DIM as usize * LANES), noise(2 * i + 1, DIM as usize * LANES));
            let positions: [u32; LANES] = std::array::from_fn(|lane| i as u32 * LANES as u32 + lane as u32);
            let (mut k, mut v) = (k.as_chunks().0.to_vec(), v.as_chunks().0.to_vec());
            if let Some(packed) = packed {
                let mut words = vec![0; packed.words() as usize];
                let (k, v) = (Channels { rows: &mut k, map: None }, Channels { rows: &mut v, map: None });
                pack::pack(lanes, &packed, &positions, k, v, &mut words);
                return words;
            }
            let mut words = vec![0; layout.words() as usize];
            for (lane, position) in positions.into_iter().enumerate() {
                let of = |rows: &[[f32; LANES]]| rows.iter().map(|row| row[lane]).collect::<Vec<_>>();
                layout.write(&mut words, lane as u32, Position(position), &of(&k), &of(&v)).unwrap();
            }
            words
        };
        let words = (0..BLOCK as u64).map(page).collect();
        Pages { layout, packed, words }
    }

    /// Bytes of the block.
    pub fn bytes(&self) -> usize {
        self.words.iter().map(|words| 4 * words.len()).sum()
    }

    /// The partial result of `rows` query rows over so many `blocks`, each with these pages, joined in order.
    pub fn attend(&self, lanes: Lanes, rows: usize, blocks: usize) -> Vec<f32> {
        let acc_rows = self.packed.map_or(self.layout.acc_rows(), |packed| packed.acc_rows());
        let sum = || vec![0.0; Partial::len(rows, acc_rows)];
        let (mut all, mut part, mut tile) = (sum(), sum(), Tile::default());
        Partial::new(&mut all, rows, acc_rows).clear();
        let q: Vec<f32> = noise(99, rows * DIM as usize).iter().map(|x| x * 0.3).collect();
        for _ in 0..blocks {
            let out = Partial::new(&mut part, rows, acc_rows);
            match self.packed {
                None => self.full(lanes, rows, &q, out, &mut tile),
                Some(packed) => self.packed(lanes, &packed, rows, &q, out),
            }
            let right = Partial::new(&mut part, rows, acc_rows);
            merge::join(lanes, Partial::new(&mut all, rows, acc_rows), right);
        }
        all
    }

    fn full(&self, lanes: Lanes, rows: usize, q: &[f32], out: Partial<'_>, tile: &mut Tile) {
        let mut queries = Vec::new();
        for (row, width) in bundles(rows, lanes.rows()) {
            for c in 0..DIM as usize {
                queries.extend((row..row + width).map(|row| q[row * DIM as usize + c]));
            }
        }
        let pages: Vec<_> = self.words.iter().map(|words| PageRef { words, live: u32::MAX }).collect();
        let sights = vec![(SEES_ALL, SEES_ALL); rows];
        let common = self.common(&sights, lanes.rows(), &queries);
        Block { common, pages: &pages, next: [&[]; 2], out, first: 0, raw: None, tile: Some(tile) }
            .run(lanes);
    }

    fn packed(&self, lanes: Lanes, packed: &Packed, rows: usize, q: &[f32], out: Partial<'_>) {
        let last = |i: usize| (i * LANES + LANES - 1) as u32;
        let pages = self.words.iter().enumerate();
        let pages: Vec<_> =
            pages.map(|(i, words)| PackedRef { words, live: u32::MAX, last: last(i), by: last(i) }).collect();
        let sights = vec![(SEES_ALL, SEES_ALL); rows];
        PackedBlock {
            common: self.common(&sights, lanes.rows().min(PACKED_ROWS), &[]),
            packed,
            back: None,
            pages: &pages,
            next: &[],
            folded: q.as_chunks().0,
            start: &vec![0.0; rows],
            rebuilt: &mut [],
            out,
            first: 0,
            raw: None,
        }
        .run(lanes);
    }

    fn common<'a>(&'a self, sights: &'a [(Sight, Sight)], most: usize, q: &'a [f32]) -> Common<'a> {
        Common {
            layout: &self.layout,
            sights,
            ring: false,
            softcap: None,
            most,
            q,
            rotation: None,
            rounded: &[],
        }
    }
}

const SEES_ALL: Sight = Sight { floor: 0, lo: 0, sinks: 0, hi: i32::MAX - 1 };
