//! The committed PTX, run by the interpreter, reads packed pages with the same bits as the CPU, in all codes.

use bytemuck::bytes_of;
use pikv::lanes::Lanes;
use pikv_core::attend::{BLOCK, Sight, filled};
use pikv_core::codec::code::{Code, Scale};
use pikv_core::codec::factors::FactorScratch;
use pikv_core::codec::pack::{Turn, pack_tables};
use pikv_core::codec::packed::{Packed, Side};
use pikv_core::codec::read::{PackedRef, Scratch};
use pikv_core::dtype::Dtype;
use pikv_core::mass::ROW;
use pikv_core::merge::Partial;
use pikv_core::page::{Layout, Position};
use pikv_core::warp::LANES;
use pikv_interpreter::{Cause, Fault, Machine, Memory};
use pikv_kernels::args::{CodecArg, LayoutArg, MapArg, PackArg, PackedArg, RopeArg, SightArg, TaskArg};
use pikv_lanes::attend::{Common, PACKED_ROWS, PackedBlock};
use pikv_lanes::pack::{Channels, pack, unpack};
use pikv_test::numbers::Rng;

const DIMS: [u32; 11] = [1, 3, 20, 32, 33, 64, 80, 96, 128, 129, 256];
const CODES: usize = Code::ALL.len();

fn machine() -> Machine {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../pikv-kernels/ptx/pikv_sm_70.ptx");
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    Machine::new(&text).unwrap_or_else(|e| panic!("{path}: {e}"))
}

struct Page {
    words: Vec<u32>,
    live: u32,
    last: u32,
    by: u32,
}

/// Packs channels as they are, on the portable lanes.
fn pack_page(packed: &Packed, positions: &[u32], k: &[[f32; LANES]], v: &[[f32; LANES]], page: &mut [u32]) {
    let (mut k, mut v) = (k.to_vec(), v.to_vec());
    let [k, v] = [&mut k, &mut v].map(|rows| Channels { rows, map: None });
    pack(Lanes::Portable, packed, positions, k, v, page);
}

/// A page of ascending positions from `start` on, with gaps; of constant groups, wide and narrow ones.
fn page(rng: &mut Rng, packed: &Packed, start: u32) -> Page {
    let fill = if rng.one_in(3) { 1 + rng.below(32) } else { 32 };
    let gap = rng.of(&[1, 1, 3, 1500]);
    let mut at = start;
    let positions = Vec::from_iter((0..fill).map(|_| {
        at += 1 + rng.below(gap);
        at - 1
    }));
    let scale = rng.of(&[1.0, 1.0, 1e-6, 100.0]);
    let mut channels = |n: u32, scale: f32| {
        Vec::from_iter((0..n).map(|_| match rng.below(8) {
            0 => [rng.value(scale); LANES],
            1 => rng.row(scale * 1e-3),
            _ => rng.row(scale),
        }))
    };
    let (mut k, mut v) = (channels(packed.k_dim, 1.0), channels(packed.v_dim, scale));
    for row in k.iter_mut().chain(&mut v) {
        let last = row[fill as usize - 1];
        row[fill as usize..].fill(last);
    }
    let mut words = vec![0; packed.words() as usize];
    pack_page(packed, &positions, &k, &v, &mut words);
    if packed.factored() {
        let mut table = |side: Side, stored: u32, dim: u32| {
            let rows = match side {
                Side::Means { level } => fill.div_ceil(1 << level),
                _ => stored + 1,
            };
            Vec::from_iter((0..rows * dim).map(|_| rng.value(scale)))
        };
        let k = table(packed.k_side, packed.k_dim, packed.query_dim());
        pack_tables(packed, &k, &table(packed.v_side, packed.v_dim, packed.out_dim()), &mut words);
    }
    let last = at - 1;
    let live = filled(fill) & if rng.one_in(3) { rng.next() as u32 } else { u32::MAX };
    Page { words, live, last, by: last + rng.of(&[0, 0, 2, 60]) }
}

/// The input of one launch of `attend_packed_r*`, or of `attend_factors`.
struct Case {
    packed: Packed,
    rows: usize,
    blocks: Vec<Vec<Page>>,
    /// `[rows][query_cols]` rows of each block.
    q: Vec<Vec<[f32; LANES]>>,
    /// `[blocks][rows]`
    start: Vec<f32>,
    /// `[blocks][rows]`
    sights: Vec<Sight>,
    softcap: Option<f32>,
    /// Whether the weights are stored.
    weights: bool,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Case { packed, rows, blocks, sights, softcap, .. } = self;
        let pages = Vec::from_iter(blocks.iter().flatten().map(|p| (p.live, p.last, p.by)));
        write!(f, "{packed:?}, {rows} rows, (live, last, by) {pages:x?}, {sights:?}, softcap {softcap:?}")
    }
}

impl Case {
    fn new(rng: &mut Rng, rows: usize, packed: Packed) -> Case {
        let (mut blocks, mut q, mut start, mut sights) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..1 + rng.below(2) {
            let mut at = rng.of(&[0, 17, 70_000]);
            let block = Vec::from_iter((0..rng.of(&[1, 2, 3, BLOCK as u32])).map(|_| {
                let page = page(rng, &packed, at);
                at = page.last + 1;
                page
            }));
            let scale = rng.of(&[0.3, 3.0, 60.0]);
            let mut row = |c: u32| {
                let mut row = rng.row(scale);
                let used = packed.query_dim().saturating_sub(c * LANES as u32).min(LANES as u32);
                row[used as usize..].fill(0.0);
                row
            };
            let mut queries: Vec<_> = (0..rows).flat_map(|_| 0..packed.query_cols()).map(&mut row).collect();
            match rng.below(24) {
                0 => queries[0][0] = rng.of(&[f32::NAN, f32::INFINITY, 3e38]),
                1 => queries.iter_mut().flatten().for_each(|q| *q *= 1e-38),
                2 => queries[0].fill(0.0),
                _ => {}
            }
            q.push(queries);
            start.extend((0..rows).map(|_| rng.value(2.0)));
            sights.extend((0..rows).map(|_| {
                let hi = at + rng.below(80);
                match rng.below(8) {
                    0 => Sight::NONE,
                    1 => Sight { floor: 0, lo: rng.below(hi), sinks: rng.below(40), hi: hi as i32 },
                    2 => Sight { floor: rng.below(hi), lo: 0, sinks: 0, hi: rng.below(hi) as i32 },
                    _ => Sight { floor: 0, lo: 0, sinks: 0, hi: hi as i32 },
                }
            }));
            blocks.push(block);
        }
        let softcap = rng.one_in(4).then_some(5.0);
        let weights = rng.one_in(3);
        Case { packed, rows, blocks, q, start, sights, softcap, weights }
    }

    fn len(&self) -> usize {
        Partial::len(self.rows, self.packed.acc_rows())
    }

    /// The partial result of a block and its weights, `[rows][pages]` rows of lanes, on the CPU.
    fn host(&self, lanes: Lanes, block: usize) -> (Vec<f32>, Vec<[f32; LANES]>) {
        let pages = Vec::from_iter(self.blocks[block].iter().map(|page| {
            let Page { words, live, last, by } = page;
            PackedRef { words, live: *live, last: *last, by: *by }
        }));
        let rows = block * self.rows..(block + 1) * self.rows;
        let sights = Vec::from_iter(self.sights[rows.clone()].iter().map(|sight| (*sight, *sight)));
        let mut part = vec![f32::NAN; self.len()];
        let mut raw = vec![[f32::NAN; LANES]; self.rows * pages.len()];
        PackedBlock {
            common: Common {
                // Keys come rotated: the layout of full pages is not read.
                layout: &Layout::new(1, Dtype::F32),
                sights: &sights,
                ring: false,
                softcap: self.softcap,
                most: lanes.rows().min(PACKED_ROWS),
                q: &[],
                rotation: None,
                rounded: &[],
            },
            packed: &self.packed,
            back: None,
            pages: &pages,
            next: &[],
            folded: &self.q[block],
            start: &self.start[rows],
            rebuilt: &mut [],
            out: Partial::new(&mut part, self.rows, self.packed.acc_rows()),
            first: 0,
            raw: Some(&mut raw),
        }
        .run(lanes);
        (part, raw)
    }

    /// Parts of all blocks by the PTX, and the weights, if they are kept. Leaves memory as it is if that fails.
    fn device(&self, machine: &mut Machine, threads: u32) -> Result<(Vec<f32>, Vec<f32>), Fault> {
        let memory = &mut machine.memory;
        let (mut tasks, mut pages) = (Vec::new(), Vec::new());
        let bundle = self.q[0].len() * LANES;
        for (i, block) in (0u32..).zip(&self.blocks) {
            tasks.push(TaskArg {
                part: u64::from(i) * self.len() as u64,
                raw: u64::from(i) * (self.rows * ROW) as u64,
                q: i * bundle as u32,
                pages: pages.len() as u32,
                count: block.len() as u32,
                sights: i * self.rows as u32,
            });
            pages.extend(block.iter().map(|page| memory.put(&page.words)));
        }
        let of = |f: fn(&Page) -> u32| Vec::from_iter(self.blocks.iter().flatten().map(f));
        let count = tasks.len();
        let factored = self.packed.factored();
        let scratch = match (self.rows, factored) {
            (1, false) => size_of::<Scratch<1>>(),
            (_, false) => size_of::<Scratch<4>>(),
            (_, true) => size_of::<FactorScratch<1>>(),
        };
        let raw = if self.weights { memory.allocate(count * self.rows * ROW * 4) } else { 0 };
        let addresses = [
            memory.put(self.q.concat().as_flattened()),
            memory.put(&self.start),
            memory.put(&pages),
            memory.put(&of(|page| page.live)),
            memory.put(&of(|page| page.last)),
            memory.put(&of(|page| page.by)),
            memory.put(&tasks),
            memory.put(&self.sights.iter().map(|s| SightArg::from(*s)).collect::<Vec<_>>()),
            memory.allocate(count * scratch),
            memory.allocate(count * self.len() * 4),
        ];
        let [q, start, list, live, last, by, tasks, sights, scratch, parts] = addresses;
        let (packed, count_arg, softcap) =
            (PackedArg::from(self.packed), count as u32, self.softcap.unwrap_or(0.0));
        let mut args = vec![
            bytes_of(&packed),
            bytes_of(&q),
            bytes_of(&start),
            bytes_of(&list),
            bytes_of(&live),
            bytes_of(&last),
            bytes_of(&by),
            bytes_of(&tasks),
            bytes_of(&count_arg),
            bytes_of(&sights),
            bytes_of(&softcap),
            bytes_of(&scratch),
            bytes_of(&parts),
            bytes_of(&raw),
        ];
        // Keys come rotated: the following arguments are not used.
        let layout = Layout::new(1, Dtype::F32);
        let (rope, layout, map, none) = (RopeArg::NONE, LayoutArg::from(layout), MapArg::NONE, 0u64);
        if factored {
            args.extend([
                bytes_of(&rope),
                bytes_of(&layout),
                bytes_of(&map),
                bytes_of(&none),
                bytes_of(&none),
            ]);
        }
        let name = if factored { "attend_factors".into() } else { format!("attend_packed_r{}", self.rows) };
        machine.launch(&name, (count as u32 * 32).div_ceil(threads), threads, &args)?;
        let memory = &mut machine.memory;
        let out = memory.read(parts, count * self.len()).expect("all was written");
        let mut weights = Vec::new();
        if self.weights {
            // Absent pages have no weights.
            for (i, block) in self.blocks.iter().enumerate() {
                for row in (0..self.rows).map(|r| i * self.rows * ROW + r * BLOCK * LANES) {
                    let at = raw + 4 * row as u64;
                    weights.extend(memory.read::<f32>(at, block.len() * LANES).expect("written"));
                }
            }
            memory.free(raw).expect("allocated above");
        }
        for address in pages.into_iter().chain(addresses) {
            memory.free(address).expect("allocated above");
        }
        Ok((out, weights))
    }

    /// Whether the PTX and these lanes agree.
    fn check(&self, lanes: Lanes, device: &(Vec<f32>, Vec<f32>)) -> Result<(), String> {
        let width = self.packed.acc_rows() as usize * LANES;
        let mut weights = device.1.chunks(LANES);
        for (block, got) in device.0.chunks(self.len()).enumerate() {
            let (part, raw) = self.host(lanes, block);
            let (m, l) = part[self.rows * width..].split_at(self.rows);
            for r in 0..self.rows {
                let [at_m, at_l] = [self.rows * width + r, self.rows * (width + 1) + r];
                if bits(m[r]) != bits(got[at_m]) {
                    return Err(format!("block {block}, row {r}: m is {:e} and {:e}", m[r], got[at_m]));
                }
                if bits(l[r]) != bits(got[at_l]) {
                    return Err(format!("block {block}, row {r}: l is {:e} and {:e}", l[r], got[at_l]));
                }
                // Not specified are the sums of a row with a score that is NaN, of one that sees nothing, and of integers under a
                // weight that is infinite.
                let none = l[r].is_nan()
                    || m[r] == f32::NEG_INFINITY
                    || !l[r].is_finite() && self.packed.v.scale() == Scale::Affine;
                let own = r * width..(r + 1) * width;
                let same = |(a, b): (&f32, &f32)| bits(*a) == bits(*b);
                if !none && !part[own.clone()].iter().zip(&got[own.clone()]).all(same) {
                    return Err(format!(
                        "block {block}, row {r}: {:?} and {:?}",
                        &part[own.clone()],
                        &got[own]
                    ));
                }
            }
            for want in raw.iter().filter(|_| self.weights) {
                let got = weights.next().expect("as many");
                if want.map(bits) != *got.iter().map(|x| bits(*x)).collect::<Vec<_>>() {
                    return Err(format!("weights of block {block}: {got:?} and {want:?}"));
                }
            }
        }
        Ok(())
    }
}

/// The bits of `x`; those of a NaN are unspecified.
fn bits(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

#[test]
fn reads_packed_pages_with_the_bits_of_the_cpu() {
    let mut machine = machine();
    let mut rng = Rng(0xc0dec);
    for rows in [1, 4] {
        for i in 0..CODES * CODES * 4 {
            let (k, v) = (Code::ALL[i % CODES], Code::ALL[i / CODES % CODES]);
            let packed = Packed::new(rng.of(&DIMS), rng.of(&DIMS), k, v);
            let case = Case::new(&mut rng, rows, packed);
            let threads = rng.of(&[32, 64]);
            let device = case.device(&mut machine, threads).unwrap_or_else(|e| panic!("{e}: {case:?}"));
            for lanes in Lanes::available() {
                let name = lanes.name();
                case.check(lanes, &device).unwrap_or_else(|e| panic!("{name}: {e}: {case:?}"));
            }
        }
        let (idle, of) = machine.program.idle(&format!("attend_packed_r{rows}"));
        println!("{rows} rows: {} of {of} instructions idle", idle.len());
        // The rest are branches of checks that hold.
        assert!(idle.len() * 6 < of, "{rows} rows: of {of} instructions nothing ran {idle:?}");
    }
}

/// Factors: K and V each of tokens, of means, or in a basis.
#[test]
fn reads_factors_with_the_bits_of_the_cpu() {
    let mut machine = machine();
    let mut rng = Rng(0xfac7);
    for i in 0..CODES * CODES * 5 {
        let mut side = |i: usize, wide: u32| {
            let code = Code::ALL[i % CODES];
            match rng.below(5) {
                0 => (code, wide, Side::Tokens),
                1 | 2 => (Code::ALL[i % 3], wide, Side::Means { level: 1 + rng.below(3) }),
                _ => (code, 1 + rng.below(31), Side::Basis { wide }),
            }
        };
        let ((k, k_dim, k_side), (v, v_dim, v_side)) =
            (side(i, DIMS[i % 11]), side(i / CODES, DIMS[i / 11 % 11]));
        let packed = Packed::new(k_dim, v_dim, k, v).sides(k_side, v_side);
        let case = Case::new(&mut rng, 1, packed);
        let threads = rng.of(&[32, 64]);
        let device = case.device(&mut machine, threads).unwrap_or_else(|e| panic!("{e}: {case:?}"));
        for lanes in Lanes::available() {
            let name = lanes.name();
            case.check(lanes, &device).unwrap_or_else(|e| panic!("{name}: {e}: {case:?}"));
        }
    }
    let (idle, of) = machine.program.idle("attend_factors");
    println!("{} of {of} instructions idle", idle.len());
    // Half of it is for keys before their rotation, which the tests of the back end read.
    assert!(idle.len() * 3 < of * 2, "of {of} instructions nothing ran {idle:?}");
}

/// Pages packed by the PTX: every word of them, with every map.
#[test]
fn packs_pages_with_the_words_of_the_cpu() {
    let mut machine = machine();
    let mut rng = Rng(0x9ac4);
    for i in 0..CODES * CODES {
        let (k, v) = (Code::ALL[i % CODES], Code::ALL[i / CODES % CODES]);
        let dtypes = [(); 2].map(|()| rng.of(&Dtype::ALL));
        let layout = Layout::new(rng.of(&DIMS), dtypes[0]).values(rng.of(&DIMS), dtypes[1]);
        let fill = if rng.one_in(3) { 1 + rng.below(32) } else { 32 };
        let mut page = vec![u32::MAX; layout.words() as usize];
        let scale = rng.of(&[1.0, 1e-6, 100.0]);
        for lane in 0..fill {
            let row = |n: u32, rng: &mut Rng| Vec::from_iter((0..n).map(|_| rng.value(scale)));
            let (key, value) = (row(layout.k_dim, &mut rng), row(layout.v_dim, &mut rng));
            layout.write(&mut page, lane, Position(70_000 + 3 * lane), &key, &value).expect("they fit");
        }
        let maps = [layout.k_dim, layout.v_dim].map(|dim| Form::draw(&mut rng, dim));
        let packed = Packed::new(maps[0].narrow(layout.k_dim), maps[1].narrow(layout.v_dim), k, v);
        let what = format!("{layout:?}, {packed:?}, {fill} tokens, {maps:?}");
        let memory = &mut machine.memory;
        let arguments = [maps[0].put(layout.k_dim, memory), maps[1].put(layout.v_dim, memory)];
        let [k, v] = [0, 1].map(|i| arguments[i].0);
        let codec = memory.put(&[CodecArg { packed: PackedArg::from(packed), k, v }]);
        let (from, to) = (memory.put(&page), memory.allocate(packed.bytes() as usize));
        let work = memory.allocate(4 * 256 * LANES * 4);
        let list = memory.put(&[PackArg { page: from, packed: to, fill, codec: 0 }]);
        let arg = LayoutArg::from(layout);
        let args: &[&[u8]] =
            &[bytes_of(&arg), bytes_of(&codec), bytes_of(&list), bytes_of(&1u32), bytes_of(&work)];
        machine.launch("pack_pages", 1, 32, args).unwrap_or_else(|e| panic!("{e}, {what}"));
        let got: Vec<u32> = machine.memory.read(to, packed.words() as usize).expect("all was written");
        for lanes in Lanes::available() {
            let want = close(lanes, &layout, &packed, &maps, &page, fill);
            assert!(got == want, "{} lanes, {what}", lanes.name());
        }
        let put = arguments.iter().flat_map(|(_, put)| put.iter().copied());
        for address in put.chain([codec, from, to, work, list]) {
            machine.memory.free(address).expect("allocated above");
        }
    }
    let (idle, of) = machine.program.idle("pack_pages");
    println!("{} of {of} instructions idle", idle.len());
}

/// A map as the kernels are given it.
#[derive(Debug)]
enum Form {
    None,
    Hadamard,
    Select(Vec<u32>),
    Dense(Vec<f32>, Vec<f32>),
}

impl Form {
    fn draw(rng: &mut Rng, dim: u32) -> Form {
        let mut row = |n: u32| Vec::from_iter((0..n).map(|_| rng.value(1.0)));
        let dense = (row(dim * dim.div_ceil(2)), row(dim));
        match rng.below(5) {
            0 => Form::None,
            1 => Form::Hadamard,
            2 => Form::Select((0..dim).step_by(2).collect()),
            3 => Form::Dense(dense.0, Vec::new()),
            _ => Form::Dense(dense.0, dense.1),
        }
    }

    fn narrow(&self, dim: u32) -> u32 {
        if matches!(self, Form::None | Form::Hadamard) { dim } else { dim.div_ceil(2) }
    }

    fn turn(&self, dim: usize) -> Option<Turn<'_>> {
        match self {
            Form::None => None,
            Form::Hadamard => Some(Turn::Hadamard { block: 1 << dim.trailing_zeros() }),
            Form::Select(channels) => Some(Turn::Select { channels }),
            Form::Dense(encode, bias) => Some(Turn::Dense { encode, bias }),
        }
    }

    /// The argument, and the memory that it points to.
    fn put(&self, dim: u32, memory: &mut Memory) -> (MapArg, Vec<u64>) {
        let none = MapArg { wide: dim, narrow: self.narrow(dim), ..MapArg::NONE };
        match self {
            Form::None => (MapArg::NONE, vec![]),
            Form::Hadamard => {
                (MapArg { form: MapArg::HADAMARD, block: 1 << dim.trailing_zeros(), ..none }, vec![])
            }
            Form::Select(channels) => {
                let table = memory.put(channels);
                (MapArg { form: MapArg::SELECT, table, ..none }, vec![table])
            }
            Form::Dense(encode, bias) => {
                let table = memory.put(encode);
                let at = if bias.is_empty() { 0 } else { memory.put(bias) };
                let map = MapArg { form: MapArg::DENSE, table, bias: at, ..none };
                (map, [table, at].into_iter().filter(|at| *at > 0).collect())
            }
        }
    }
}

/// The words of a packed page of the first `fill` tokens of a full one.
fn close(
    lanes: Lanes,
    layout: &Layout,
    packed: &Packed,
    maps: &[Form; 2],
    page: &[u32],
    fill: u32,
) -> Vec<u32> {
    let rows = |n: u32| vec![[0.0; LANES]; n as usize];
    let (mut k, mut v) = (rows(layout.k_dim), rows(layout.v_dim));
    unpack(lanes, layout, page, fill, &mut k, &mut v);
    let (mut narrow_k, mut narrow_v) = (rows(packed.k_dim), rows(packed.v_dim));
    let k_map = maps[0].turn(k.len()).map(|form| (form, &mut narrow_k[..]));
    let v_map = maps[1].turn(v.len()).map(|form| (form, &mut narrow_v[..]));
    let (k, v) = (Channels { rows: &mut k, map: k_map }, Channels { rows: &mut v, map: v_map });
    let mut out = vec![0; packed.words() as usize];
    pack(lanes, packed, &page[..fill as usize], k, v, &mut out);
    out
}

/// Integers at the ends of their range: every product of a code and a rounded query or weight, with sums near the ends of i32.
#[test]
fn integer_products_at_their_ends() {
    let mut machine = machine();
    for code in [Code::Int8, Code::Int6, Code::Int5, Code::Int4, Code::Int3, Code::Int2] {
        for (rows, sign) in [(1, 1.0), (4, 1.0), (1, -1.0), (4, -1.0)] {
            let packed = Packed::new(256, 256, code, code);
            let mut rng = Rng(7);
            let mut case = Case::new(&mut rng, rows, packed);
            // Every channel takes the first code and the last, and every query is the largest.
            let top = code.top();
            let x: Vec<_> = (0..256)
                .map(|c| std::array::from_fn(|t| if (c + t) % 16 == 0 { 0.0 } else { top }))
                .collect();
            let positions: Vec<u32> = (0..32).collect();
            let mut words = vec![0; packed.words() as usize];
            pack_page(&packed, &positions, &x, &x, &mut words);
            case.blocks = vec![vec![Page { words, live: u32::MAX, last: 31, by: 31 }]];
            case.q = vec![vec![[sign / 1024.0; LANES]; rows * 8]];
            case.start = vec![0.0; rows];
            case.sights = vec![Sight { floor: 0, lo: 0, sinks: 0, hi: 31 }; rows];
            (case.softcap, case.weights) = (None, true);
            let device = case.device(&mut machine, 32).unwrap_or_else(|e| panic!("{e}: {case:?}"));
            for lanes in Lanes::available() {
                case.check(lanes, &device).unwrap_or_else(|e| panic!("{}: {e}: {case:?}", lanes.name()));
            }
        }
    }
}

#[test]
fn a_word_past_the_page_is_found() {
    let mut machine = machine();
    let mut rng = Rng(3);
    for code in Code::ALL {
        let packed = Packed::new(64, 256, code, code);
        let mut case = Case::new(&mut rng, 1, packed);
        let mut page = page(&mut rng, &packed, 0);
        // The last word is read, but missing.
        page.live = u32::MAX;
        page.words.pop();
        let last = page.last as i32;
        case.blocks = vec![vec![Page { by: page.last, ..page }]];
        case.q.truncate(1);
        case.sights = vec![Sight { floor: 0, lo: 0, sinks: 0, hi: last }];
        let fault = case.device(&mut machine, 32).expect_err("a page that is too short");
        assert!(matches!(fault.cause, Cause::OutOfBounds { .. }), "{}: {fault}", code.name());
    }
}
