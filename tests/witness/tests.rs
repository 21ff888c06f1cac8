//! The committed PTX, run by the witness: tokens are appended, attended block by block, merged and finished. Each stage has the bits of the
//! CPU's lanes, and the result is that of attention in f64. The same with faults in the PTX is found. All kernels with all their
//! arguments are run by the tests of the CUDA back end over the witness: `.ci/witness`.

use bytemuck::{NoUninit, bytes_of};
use pikv_core::attend::{BLOCK, Sight, filled};
use pikv_core::dtype::Dtype;
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::page::{Layout, Position};
use pikv_core::warp::LANES;
use pikv_kernels::args::{JoinArg, LayoutArg, RopeArg, RowArg, SightArg, TaskArg, WriteArg};
use pikv_kernels::ptx::TEXT;
use pikv_lanes::Lanes;
use pikv_lanes::attend::{Block, Common, Finish, bundles};
use pikv_lanes::merge::join;
use pikv_witness::{Order, Program};

const ORDERS: [Order; 2] = [Order::LowestFirst, Order::HighestFirst];

/// A head with some tokens and a bundle of query rows, of which row `r` does not see the last `r` tokens.
struct Case {
    layout: Layout,
    rows: usize,
    tokens: usize,
    /// `[tokens][k_dim]`
    keys: Vec<f32>,
    /// `[tokens][v_dim]`
    values: Vec<f32>,
    /// `[channels][rows]`, times the scale in base 2.
    q: Vec<f32>,
}

/// Results of the kernels or of the lanes.
struct Found {
    pages: Vec<Vec<u32>>,
    /// Partial results of all blocks, before they are merged.
    blocks: Vec<f32>,
    /// The merged one.
    merged: Vec<f32>,
    /// `[rows][v_dim]`
    out: Vec<f32>,
    /// Log-sum-exp of each row.
    lse: Vec<f32>,
}

/// Multiples of 1/32 between -2 and 2, which every dtype holds.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed;
    let mut next = || {
        x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        ((x >> 57) as f32 - 64.0) / 32.0
    };
    (0..n).map(|_| next()).collect()
}

impl Case {
    fn new(layout: Layout, rows: usize, tokens: usize) -> Case {
        let (k_dim, v_dim) = (layout.k_dim as usize, layout.v_dim as usize);
        let channels = layout.k_channels() as usize;
        let scale = std::f32::consts::LOG2_E / (k_dim as f32).sqrt();
        let mut q = numbers(3, channels * rows);
        q.iter_mut().for_each(|q| *q *= scale);
        q[k_dim * rows..].fill(0.0);
        let (keys, values) = (numbers(1, tokens * k_dim), numbers(2, tokens * v_dim));
        Case { layout, rows, tokens, keys, values, q }
    }

    fn len(&self) -> usize {
        Partial::len(self.rows, self.layout.acc_rows())
    }

    fn pages(&self) -> usize {
        self.tokens.div_ceil(LANES)
    }

    /// Lanes of page `i` that hold tokens.
    fn live(&self, i: usize) -> u32 {
        filled((self.tokens - i * LANES).min(LANES) as u32)
    }

    fn sights(&self) -> Vec<Sight> {
        let last = self.tokens as i32 - 1;
        (0..self.rows as i32).map(|r| Sight { floor: 0, lo: 0, sinks: 0, hi: last - r }).collect()
    }

    /// Pairs of blocks to merge, level by level.
    fn levels(&self) -> Vec<Vec<(usize, usize)>> {
        let blocks = self.pages().div_ceil(BLOCK);
        let steps = (0..).map(|level| 1 << level).take_while(|step| *step < blocks);
        steps
            .map(|step| (0..blocks - step).step_by(2 * step).map(|left| (left, left + step)).collect())
            .collect()
    }

    /// By the kernels.
    fn device(&self, program: &Program, order: Order) -> Result<Found, String> {
        let (layout, count) = (LayoutArg::from(self.layout), |n: usize| n as u32);
        let launch_blocks = |entry: &str, shape: (u32, u32), arguments: &[&[u8]]| {
            let arguments: Vec<*const u8> = arguments.iter().map(|bytes| bytes.as_ptr()).collect();
            // SAFETY: the arguments are those of the kernel, and their lists and memory outlive the launch.
            unsafe { program.launch(entry, shape, &arguments, order) }
        };
        let launch = |entry: &str, warps: usize, arguments: &[&[u8]]| {
            launch_blocks(entry, (warps.div_ceil(4) as u32, 128), arguments)
        };
        let mut pages = vec![vec![u32::MAX; self.layout.words() as usize]; self.pages()];
        let at: Vec<u64> = pages.iter_mut().map(|page| page.as_mut_ptr() as u64).collect();
        let write = |t: usize| WriteArg { page: at[t / LANES], position: count(t), row: count(t) };
        let writes: Vec<WriteArg> = (0..self.tokens).map(write).collect();
        let lists = [address(&self.keys), address(&self.values), address(&writes)];
        let [k, v, list] = lists.each_ref().map(bytes_of);
        let tokens = count(self.tokens);
        let arguments = [bytes_of(&layout), k, v, list, bytes_of(&tokens), bytes_of(&0u64), bytes_of(&0u32)];
        launch("append", self.tokens, &arguments)?;

        let live: Vec<u32> = (0..pages.len()).map(|i| self.live(i)).collect();
        let sights: Vec<SightArg> = self.sights().into_iter().map(SightArg::from).collect();
        let firsts = (0..pages.len()).step_by(BLOCK);
        let tasks: Vec<TaskArg> = firsts
            .enumerate()
            .map(|(i, first)| TaskArg {
                part: (i * self.len()) as u64,
                raw: 0,
                q: 0,
                pages: count(first),
                count: count((pages.len() - first).min(BLOCK)),
                sights: 0,
            })
            .collect();
        let mut parts = vec![f32::NAN; tasks.len() * self.len()];
        let parts_at = parts.as_mut_ptr() as u64;
        let lists = [address(&self.q), address(&at), address(&live), address(&tasks), address(&sights)];
        let [q, list, live, task_list, sights] = lists.each_ref().map(bytes_of);
        let (rope, none, number) = (RopeArg::NONE, 0u64, count(tasks.len()));
        let arguments = [bytes_of(&layout), q, list, live, task_list, bytes_of(&number), sights];
        let rest = [bytes_of(&0f32), bytes_of(&rope), bytes_of(&none), bytes_of(&parts_at), bytes_of(&none)];
        launch(&format!("attend_r{}", self.rows), tasks.len(), &[&arguments[..], &rest].concat())?;
        let blocks = parts.clone();

        let levels = self.levels();
        let part = |block: usize| (block * self.len()) as u64;
        let (acc_rows, head) = (self.layout.acc_rows(), JoinArg::MERGE);
        let join = |(left, right): &(usize, usize)| JoinArg {
            left: part(*left),
            right: part(*right),
            acc_rows,
            head,
        };
        let joins: Vec<JoinArg> = levels.iter().flatten().map(join).collect();
        let bound = |level: usize| count(levels[..level].iter().map(Vec::len).sum());
        let bounds: Vec<u32> = (0..=levels.len()).map(bound).collect();
        let [rows, levels] = [self.rows, levels.len()].map(count);
        let row = |row| RowArg { part: 0, rows, row, out: row, bounds: 0, levels, pad: 0 };
        let rows: Vec<RowArg> = (0..rows).map(row).collect();
        let mut out = vec![f32::NAN; self.rows * self.layout.v_dim as usize];
        let mut ends = vec![[f32::NAN; 3]; self.rows];
        let lists = [address(&rows), address(&joins), address(&bounds), 0, 0, parts_at];
        let ends_at = [out.as_mut_ptr() as u64, ends.as_mut_ptr() as u64];
        let lists = lists.iter().chain(&ends_at).map(bytes_of);
        let arguments: Vec<&[u8]> = [bytes_of(&layout)].into_iter().chain(lists).collect();
        // For 1,700 tokens fewer warps than joins of the first level.
        launch_blocks("finish_rows", (count(self.rows), 64), &arguments)?;
        let merged = parts[..self.len()].to_vec();
        Ok(Found { pages, blocks, merged, out, lse: ends.into_iter().map(|[lse, _, _]| lse).collect() })
    }

    /// By the CPU's lanes.
    fn host(&self, lanes: Lanes) -> Found {
        let (k_dim, v_dim) = (self.layout.k_dim as usize, self.layout.v_dim as usize);
        let mut pages = vec![vec![u32::MAX; self.layout.words() as usize]; self.pages()];
        for t in 0..self.tokens {
            let (key, value) = (&self.keys[t * k_dim..][..k_dim], &self.values[t * v_dim..][..v_dim]);
            let page = &mut pages[t / LANES];
            self.layout.write(page, (t % LANES) as u32, Position(t as u32), key, value).expect("finite");
        }
        let refs: Vec<PageRef<'_>> =
            (0..).zip(&pages).map(|(i, words)| PageRef { words, live: self.live(i) }).collect();
        let sights: Vec<(Sight, Sight)> = self.sights().into_iter().map(|sight| (sight, sight)).collect();
        let q: Vec<f32> = bundles(self.rows, lanes.rows())
            .flat_map(|(row, width)| {
                self.q.chunks(self.rows).flat_map(move |q| &q[row..row + width]).copied()
            })
            .collect();
        let mut blocks = Vec::new();
        for pages in refs.chunks(BLOCK) {
            let mut part = vec![f32::NAN; self.len()];
            let common = Common {
                layout: &self.layout,
                sights: &sights,
                ring: false,
                softcap: None,
                most: lanes.rows(),
                q: &q,
                rotation: None,
                rounded: &[],
            };
            let out = Partial::new(&mut part, self.rows, self.layout.acc_rows());
            Block { common, pages, next: [&[]; 2], out, first: 0, raw: None, tile: None }.run(lanes);
            blocks.push(part);
        }
        let mut parts = blocks.clone();
        for (left, right) in self.levels().into_iter().flatten() {
            let mut other = parts[right].clone();
            let [left, right] = [&mut parts[left], &mut other]
                .map(|part| Partial::new(part, self.rows, self.layout.acc_rows()));
            join(lanes, left, right);
        }
        let merged = parts.swap_remove(0);
        let mut sums = merged.clone();
        let part = Partial::new(&mut sums, self.rows, self.layout.acc_rows());
        let mut out = vec![f32::NAN; self.rows * v_dim];
        let acc = part.acc.chunks(self.layout.acc_rows() as usize);
        let rows = out.chunks_mut(v_dim).zip(acc).enumerate();
        let finish = |(r, (out, acc)): (usize, (&mut [f32], _))| {
            Finish { layout: &self.layout, m: part.m[r], l: part.l[r], acc, out }.run(lanes)
        };
        let lse = rows.map(finish).collect();
        Found { pages, blocks: blocks.concat(), merged, out, lse }
    }

    /// Log-sum-exp and output of a row, in f64.
    fn exact(&self, r: usize) -> (f64, Vec<f64>) {
        let (k_dim, v_dim) = (self.layout.k_dim as usize, self.layout.v_dim as usize);
        let query = |c: usize| f64::from(self.q[c * self.rows + r]);
        let seen = self.tokens - r;
        let score = |key: &[f32]| (0..k_dim).map(|c| query(c) * f64::from(key[c])).sum::<f64>() * 2f64.ln();
        let scores: Vec<f64> = self.keys.chunks(k_dim).take(seen).map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0; v_dim];
        for (weight, value) in weights.iter().zip(self.values.chunks(v_dim)) {
            out.iter_mut().zip(value).for_each(|(out, value)| *out += weight / sum * f64::from(*value));
        }
        (most + sum.ln(), out)
    }

    /// Whether the kernels of a program have the bits of all lanes, and are as close to attention in f64 as they should be.
    fn check(&self, program: &Program, order: Order) -> Result<(), String> {
        let found = self.device(program, order)?;
        let bits = |list: &[f32]| -> Vec<u32> { list.iter().map(|x| x.to_bits()).collect() };
        for lanes in Lanes::available() {
            let want = self.host(lanes);
            for (what, got, want) in [
                ("blocks", &found.blocks, &want.blocks),
                ("merged result", &found.merged, &want.merged),
                ("output", &found.out, &want.out),
                ("log-sum-exp", &found.lse, &want.lse),
            ] {
                if bits(got) != bits(want) {
                    return Err(format!("{what} of {} lanes and {order:?} differ", lanes.name()));
                }
            }
            if found.pages != want.pages {
                return Err(format!("pages of {} lanes and {order:?} differ", lanes.name()));
            }
        }
        for r in 0..self.rows {
            let (lse, out) = self.exact(r);
            let got = found.out[r * out.len()..][..out.len()].iter().chain([&found.lse[r]]);
            let far = got.zip(out.iter().chain([&lse])).find(|(got, want)| {
                // A NaN is not close.
                let close = (f64::from(**got) - **want).abs() < 2e-6;
                !close
            });
            if let Some((got, want)) = far {
                return Err(format!("row {r}, {order:?}: {got:e} and in f64 {want:e}"));
            }
        }
        Ok(())
    }
}

/// The address of a list as an argument.
fn address<T: NoUninit>(list: &[T]) -> u64 {
    list.as_ptr() as u64
}

#[test]
fn kernels_have_the_bits_of_the_lanes_and_attend_as_in_f64() {
    let program = Program::new(TEXT).unwrap();
    for (layout, rows, tokens) in [
        (Layout::new(128, Dtype::Bf16).values(128, Dtype::Bf16), 4, 1700),
        (Layout::new(64, Dtype::F32).values(80, Dtype::F16), 4, 256),
        (Layout::new(80, Dtype::F16).values(33, Dtype::F32), 4, 90),
        (Layout::new(33, Dtype::Bf16).values(256, Dtype::F16), 1, 513),
    ] {
        let case = Case::new(layout, rows, tokens);
        for order in ORDERS {
            case.check(&program, order).unwrap_or_else(|e| panic!("{layout:?}, {tokens} tokens: {e}"));
        }
    }
}

/// The text with the first `old` after `mark` in a kernel replaced.
fn spoilt(entry: &str, mark: &str, old: &str, new: &str) -> String {
    let mut at = 0;
    for text in [&format!(".entry {entry}("), mark, old] {
        at += TEXT[at..].find(text).unwrap_or_else(|| panic!("{entry} has no {text}"));
    }
    format!("{}{new}{}", &TEXT[..at], &TEXT[at + old.len()..])
}

#[test]
fn faults_of_the_ptx_show() {
    let case = Case::new(Layout::new(128, Dtype::Bf16).values(128, Dtype::Bf16), 4, 1700);
    for (entry, mark, old, new) in [
        // The maximum over the lanes, and the exponential after it.
        ("attend_r4", "shfl.sync.bfly.b32", "setp.gt.f32", "setp.lt.f32"),
        ("attend_r4", "shfl.sync.bfly.b32", "max.f32", "min.f32"),
        ("attend_r4", "shfl.sync.bfly.b32", "add.rn.f32", "mul.rn.f32"),
        ("finish_rows", "", "bar.warp.sync \t-1;", ""),
        ("finish_rows", "", "bar.sync \t0;", ""),
        ("finish_rows", "", "setp.gt.f32", "setp.lt.f32"),
        ("finish_rows", "", "add.rn.f32", "mul.rn.f32"),
        ("finish_rows", "", "add.rn.f32", "sub.rn.f32"),
        ("finish_rows", "", "div.rn.f32", "mul.rn.f32"),
        ("append", "", "shl.b32", "shr.u32"),
    ] {
        let what = format!("{entry}: {old} -> {new}");
        let program = Program::new(&spoilt(entry, mark, old, new)).unwrap_or_else(|e| panic!("{what}: {e}"));
        for entry in ["append", "attend_r4", "finish_rows"] {
            program.compile(entry).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        let found = ORDERS.map(|order| case.check(&program, order).err());
        println!("{what}: {found:?}");
        assert!(found.iter().any(Option::is_some), "{what} is not found");
    }
}
