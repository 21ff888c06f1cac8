//! Rows attended together have the bits of each row alone: tiles of rows over a block of pages, and calls with many rows.

use pikv::codec::{Code, Codec, Coding};
use pikv::lanes::Lanes;
use pikv::shape::Pairs;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Layout, Position, Rope, Rows};
use pikv_core::attend::{BLOCK, Sight};
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::rope::Rotation;
use pikv_core::warp::LANES;
use pikv_lanes::attend::{Block, Common, bundles};
use pikv_lanes::tile::{Tile, pays, round_queries};
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;

// ---- A block ---------------------------------------------------------------------------------------------------

/// Pages of a block, the lanes that rows see, and the rows' queries.
pub struct Case {
    pub layout: Layout,
    pub rope: Option<Rope>,
    table: Vec<f32>,
    pub softcap: Option<f32>,
    pub ring: bool,
    pub pages: Vec<(Vec<u32>, u32)>,
    pub sights: Vec<(Sight, Sight)>,
    /// `[rows][k_channels]`
    pub q: Vec<Vec<f32>>,
    /// Whether queries and weights are rounded.
    pub fast: bool,
}

const CAPACITY: u32 = 512;

fn pick<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.next() as usize % of.len()]
}

impl Case {
    fn random(rng: &mut Rng) -> Case {
        let dtypes = [pick(rng, &Dtype::ALL), pick(rng, &Dtype::ALL)];
        Case::of(rng, dtypes)
    }

    /// A random case with K and V of these dtypes.
    pub fn of(rng: &mut Rng, [k, v]: [Dtype; 2]) -> Case {
        let dims = [1, 2, 15, 31, 32, 33, 48, 64, 80, 128];
        let layout = Layout::new(pick(rng, &dims), k).values(pick(rng, &dims), v);
        let turned = layout.k_dim / 2 * 2;
        let rope = (turned > 0 && rng.next().is_multiple_of(3)).then(|| {
            let rope = Rope::new(10_000.0, pick(rng, &[2, turned]));
            rope.pairs(pick(rng, &[Pairs::Halves, Pairs::Neighbours]))
        });
        let angles = rope.map_or(0, |rope| rope.rotary_dim as usize / 2 * 2 * CAPACITY as usize);
        let pages: Vec<_> =
            (0..1 + rng.next() % BLOCK as u64).map(|i| page(rng, &layout, i as u32)).collect();
        let rows = 1 + rng.next() as usize % 80;
        let last = pages.len() as u32 * LANES as u32;
        let group = pick(rng, &[1, 3, 4, 8]);
        let kind = rng.next() % 4;
        let from = rng.next() as u32 % last;
        let window = pick(rng, &[3, 40, 1000]);
        let sights = (0..rows as u32).map(|r| match kind {
            // Sees all, causal, causal in a window beside sinks, anything.
            0 => Sight { floor: 0, lo: 0, sinks: 0, hi: last as i32 },
            1 => Sight { floor: 0, lo: 0, sinks: 0, hi: (from + r / group) as i32 },
            2 => {
                let hi = from + r / group;
                Sight { floor: from / 3, lo: (hi + 1).saturating_sub(window), sinks: 5, hi: hi as i32 }
            }
            _ => {
                let mut any = || rng.next() as u32 % (last + 8);
                Sight { floor: any() / 4, lo: any(), sinks: any() / 8, hi: any() as i32 - 4 }
            }
        });
        let sights: Vec<_> = sights.map(|sight| (Sight::NONE, sight)).collect();
        let ring = rng.next().is_multiple_of(2);
        let sights = sights.into_iter().map(|(a, b)| if ring { (a, b) } else { (b, a) }).collect();
        let channels = layout.k_channels() as usize;
        let query = |rng: &mut Rng| {
            let mut q: Vec<f32> = noise(rng.next(), channels).iter().map(|x| 6.0 * x).collect();
            q[layout.k_dim as usize..].fill(0.0);
            q
        };
        let q = (0..rows).map(|_| query(rng)).collect();
        let softcap = rng.next().is_multiple_of(4).then_some(3.0);
        let table = noise(rng.next(), angles);
        Case { layout, rope, table, softcap, ring, pages, sights, q, fast: false }
    }

    /// Attends rows `from..to` in bundles of `most`, and their weights after them.
    pub fn attend(
        &self,
        lanes: Lanes,
        from: usize,
        to: usize,
        most: usize,
        tile: Option<&mut Tile>,
    ) -> Vec<f32> {
        let rows = to - from;
        let mut q = Vec::new();
        for (row, width) in bundles(rows, most) {
            for c in 0..self.layout.k_channels() as usize {
                q.extend((row..row + width).map(|row| self.q[from + row][c]));
            }
        }
        let mut rounded = Vec::new();
        if self.fast {
            round_queries(lanes, &self.layout, most, &q, &mut rounded);
        }
        let pages: Vec<_> = self.pages.iter().map(|(words, live)| PageRef { words, live: *live }).collect();
        let acc_rows = self.layout.acc_rows();
        let mut part = vec![f32::NAN; Partial::len(rows, acc_rows)];
        let mut raw = vec![[f32::NAN; LANES]; rows * pages.len()];
        let rotation = self.rope.map(|rope| Rotation { rope, table: &self.table, capacity: CAPACITY });
        Block {
            common: Common {
                layout: &self.layout,
                sights: &self.sights[from..to],
                ring: self.ring,
                softcap: self.softcap,
                most,
                q: &q,
                rotation,
                rounded: &rounded,
            },
            pages: &pages,
            next: [&[]; 2],
            out: Partial::new(&mut part, rows, acc_rows),
            first: 0,
            raw: Some(&mut raw),
            tile,
        }
        .run(lanes);
        part.extend(raw.as_flattened());
        part
    }

    /// The same row by row, in the order of all rows together.
    fn apart(&self) -> Vec<f32> {
        let (rows, acc) = (self.q.len(), self.layout.acc_rows() as usize * LANES);
        let each: Vec<_> = (0..rows).map(|row| self.attend(Lanes::Portable, row, row + 1, 1, None)).collect();
        let part = |from: usize, to: usize| each.iter().flat_map(move |row| row[from..to].iter().copied());
        let raw = each[0].len();
        part(0, acc)
            .chain(part(acc, acc + 1))
            .chain(part(acc + 1, acc + 2))
            .chain(part(acc + 2, raw))
            .collect()
    }
}

/// A page, and a bit for each lane with a token. Other lanes hold arbitrary bits, including NaN.
fn page(rng: &mut Rng, layout: &Layout, i: u32) -> (Vec<u32>, u32) {
    let mut words: Vec<u32> = (0..layout.words()).map(|_| rng.next() as u32 | 0x7fc0_0000).collect();
    let live = match rng.next() % 4 {
        0 => rng.next() as u32,
        1 => (1 << (rng.next() % 32)) - 1,
        _ => u32::MAX,
    };
    for lane in (0..LANES as u32).filter(|lane| live >> lane & 1 == 1) {
        let (k, v) = (noise(rng.next(), layout.k_dim as usize), noise(rng.next(), layout.v_dim as usize));
        let position = Position(i * LANES as u32 + lane);
        layout.write(&mut words, lane, position, &k, &v).expect("values are small");
    }
    (words, live)
}

/// Random shapes, dtypes, masks, windows, sinks, caps and rotations, on all lanes, in bundles of every width, with and without a tile.
/// Exponents, sums, outputs and weights of each row are those that it has alone.
#[test]
fn a_row_of_a_tile_has_the_bits_of_the_row_alone() {
    let mut rng = Rng(0x7153);
    let mut tiles = 0;
    for case in 0..scaled(120, 4000) {
        let one = Case::random(&mut rng);
        let rows = one.q.len();
        let want = bits(&one.apart());
        // One tile for all lanes and shapes: remains of another block have no effect.
        let mut tile = Tile::default();
        for lanes in Lanes::available() {
            for most in [lanes.rows(), lanes.rows().min(4), 1] {
                tiles += usize::from(pays(rows, most));
                for tile in [None, Some(&mut tile)] {
                    let name = if tile.is_some() { "tile" } else { "bundles" };
                    let found = bits(&one.attend(lanes, 0, rows, most, tile));
                    let at = found.iter().zip(&want).position(|(found, want)| found != want);
                    let what = (one.layout, rows, one.pages.len(), one.rope);
                    assert_eq!(at, None, "case {case}: {} {name} of {most}, {what:?}", lanes.name());
                }
            }
        }
    }
    assert!(tiles > 100, "{tiles} tiles");
}

/// The bits of a tile's rows do not depend on the other rows.
#[test]
fn a_tile_cut_anywhere_has_the_same_bits() {
    let mut rng = Rng(77);
    for _ in 0..scaled(20, 400) {
        let one = Case::random(&mut rng);
        let rows = one.q.len();
        let at = rng.next() as usize % rows;
        let lanes = Lanes::detect();
        let (all, acc) = (one.apart(), one.layout.acc_rows() as usize * LANES);
        for (from, to) in [(0, at), (at, rows)].into_iter().filter(|(from, to)| from < to) {
            let found = one.attend(lanes, from, to, lanes.rows(), Some(&mut Tile::default()));
            assert_eq!(bits(&found[..(to - from) * acc]), bits(&all[from * acc..to * acc]));
        }
    }
}

// ---- A call ----------------------------------------------------------------------------------------------------

/// The newest rows of sequences of several lengths in one call, and each row in a call of its own: every form of pages, with windows,
/// sinks, caps and rotations.
#[test]
fn rows_of_one_call_have_the_bits_of_rows_in_calls_of_their_own() {
    const NEWEST: u32 = 70;
    let plain = |code| Some(Codec::new(Coding::new(code), Coding::new(code)));
    let mut rng = Rng(5);
    for (case, codec) in
        [None, plain(Code::Int8), None, plain(Code::Int4), None, plain(Code::E4m3)].iter().enumerate()
    {
        let mut layer = LayerShape::new(2, 8, 64, Dtype::ALL[case % 3]);
        if case % 2 == 1 {
            layer = layer.rope(Rope::new(10_000.0, 64));
        }
        if case >= 2 {
            layer = layer.window(90);
        }
        let lanes: Vec<Lanes> = Lanes::available().collect();
        let mut config = CacheConfig::new(vec![layer], 64 << 20).ring(64).sinks(4).rollback(NEWEST);
        config = config.lanes(lanes[case % lanes.len()]);
        if let Some(codec) = codec {
            config = config.compress(codec.clone());
        }
        let cache = Cache::new(config).unwrap();
        let grow = |rng: &mut Rng, n: u32| {
            let mut sequence = cache.sequence();
            while sequence.next_position().0 < n {
                let rows = 50.min(n - sequence.next_position().0);
                let (k, v) = (noise(rng.next(), rows as usize * 128), noise(rng.next(), rows as usize * 128));
                let mut step = cache.begin([(&mut sequence, rows)]).unwrap();
                step.append(0, &k, &v).unwrap();
                step.commit().unwrap();
            }
            sequence
        };
        let sequences = [grow(&mut rng, 341), grow(&mut rng, 12), grow(&mut rng, 530)];
        let options = if case == 0 { Attend::new(0.5).softcap(2.0) } else { Attend::new(0.5) };
        let parts: Vec<Rows<'_>> = sequences
            .iter()
            .map(|s| {
                let n = NEWEST.min(s.next_position().0);
                Rows::new(s, Position(s.next_position().0 - n), n)
            })
            .collect();
        let total: u32 = parts.iter().map(|part| part.rows).sum();
        let q: Vec<f32> = noise(9, total as usize * 8 * 64).iter().map(|x| 4.0 * x).collect();
        let mut together = vec![0.0; q.len()];
        cache.attend(0, &parts, &q, &options, AttendOutput::new(&mut together)).unwrap();
        let mut at = 0;
        for part in &parts {
            for row in 0..part.rows {
                let one = [Rows::new(part.sequence, Position(part.first.0 + row), 1)];
                let mut alone = vec![0.0; 8 * 64];
                cache.attend(0, &one, &q[at..at + 512], &options, AttendOutput::new(&mut alone)).unwrap();
                assert_eq!(
                    bits(&alone),
                    bits(&together[at..at + 512]),
                    "case {case}, row {row} of {}",
                    part.rows
                );
                at += 512;
            }
        }
    }
}
