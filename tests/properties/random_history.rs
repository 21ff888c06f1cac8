//! Random histories against a model that keeps every row.
//!
//! The model does not have tiles, words or shares. It has one vector of tokens for each sequence, and for each layer, head and expert the
//! lists of positions that make up its pages. After every operation everything observable of every live sequence is compared with it:
//! pages, positions, stored bytes, tags, counts, limits, memory. Outputs are compared with an f64 softmax over the stored rows:
//! `|out - want| <= 3e-6` (values in [-1, 1], scores in [-4, 4]), `|lse - want| <= 5e-6`. With at most 700 tokens, each has a weight
//! above 4e-7 of the largest possible, and most far more; so an extra or missing token shows in the log-sum-exp unless its weight is
//! among the least.

use half::{bf16, f16};
use pikv::lanes::Lanes;
use pikv::report::{PageId, Place, Usage};
use pikv::shape::{Pairs, Resident};
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Layout, Position, Rope, Rows,
    Sequence, Step,
};
use pikv_test::runs::run;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const PAGE: u32 = 32;
/// Longest sequence of a history.
const LONGEST: u32 = 700;

fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |h, &part| {
        let mut z = (h ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// In [-1, 1).
fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Key,
    Value,
    Query,
}

fn row(nonce: u64, layer: usize, head: usize, kind: Kind, dim: u32) -> Vec<f32> {
    let h = mix(&[nonce, layer as u64, head as u64, kind as u64]);
    (0..u64::from(dim)).map(|c| unit(mix(&[h, c]))).collect()
}

fn stored(dtype: Dtype, row: Vec<f32>) -> Vec<f32> {
    let round = |x| match dtype {
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        _ => x,
    };
    row.into_iter().map(round).collect()
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

// ---- what is drawn

#[derive(Clone, Debug)]
struct Setup {
    layers: Vec<LayerShape>,
    ring: u32,
    rollback: u32,
    sinks: u32,
    experts: u32,
    top_k: u32,
    shards: ShardMap,
    /// Pages of every layer and head; none for plenty.
    pages: Option<u64>,
    lanes: usize,
}

impl Setup {
    fn cache(&self) -> Cache {
        let page: u64 = self.layers.iter().map(|l| u64::from(l.kv_heads) * l.layout.bytes()).sum();
        let lanes: Vec<Lanes> = Lanes::available().collect();
        let config = CacheConfig::new(self.layers.clone(), page * self.pages.unwrap_or(1 << 20))
            .ring(self.ring)
            .rollback(self.rollback)
            .sinks(self.sinks)
            .experts(self.experts, self.top_k)
            .shards(self.shards)
            .lanes(lanes[self.lanes % lanes.len()])
            .nan_fill(true)
            .backend(pikv_test::backend::backend());
        Cache::new(config).unwrap()
    }
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Dtype::F32), Just(Dtype::F16), Just(Dtype::Bf16)]
}

fn layer(windows: bool) -> impl Strategy<Value = LayerShape> {
    let window = if windows {
        prop_oneof![1 => Just(None), 3 => (1u32..=100).prop_map(Some)].boxed()
    } else {
        Just(None).boxed()
    };
    let rope = prop_oneof![
        2 => Just(None),
        1 => (1u32..=4, any::<bool>()).prop_map(|(pairs, halves)| {
            let pairs_of = if halves { Pairs::Halves } else { Pairs::Neighbours };
            Some(Rope::new(1000.0, 2 * pairs).pairs(pairs_of))
        })
    ];
    (1u32..=2, 1u32..=3, 1u32..=9, 1u32..=9, dtype(), dtype(), window, rope).prop_map(
        |(kv_heads, group, k_dim, v_dim, k, v, window, rope)| {
            LayerShape::new(kv_heads, kv_heads * group, k_dim, k)
                .values(v_dim, v)
                .window(window)
                .rope(rope.filter(|rope: &Rope| rope.rotary_dim <= k_dim))
        },
    )
}

fn shards() -> impl Strategy<Value = ShardMap> {
    prop_oneof![
        2 => (1u32..=4).prop_map(|n| ShardMap::sum(n).unwrap()),
        2 => (1u32..=4).prop_map(|n| ShardMap::spread(n).unwrap()),
        1 => Just(ShardMap::xor(4, 4, 4).unwrap()),
        1 => Just(ShardMap::xor(8, 2, 2).unwrap()),
        1 => Just(ShardMap::xor(1, 3, 3).unwrap()),
    ]
}

fn setup(experts: u32, windows: bool, tight: bool) -> impl Strategy<Value = Setup> {
    let ring = prop_oneof![1 => 1u32..=4, 3 => 1u32..=80, 1 => prop_oneof![Just(31u32), Just(32), Just(33), Just(64)]];
    let rollback = prop_oneof![1 => Just(0u32), 2 => 0u32..=40];
    let pages = if tight { (2u64..=40).prop_map(Some).boxed() } else { Just(None).boxed() };
    (
        proptest::collection::vec(layer(windows), 1..=2),
        ring,
        rollback,
        0u32..=5,
        1u32..=experts,
        1u32..=2,
        shards(),
        pages,
        0usize..3,
    )
        .prop_map(|(layers, ring, rollback, sinks, experts, top_k, shards, pages, lanes)| Setup {
            layers,
            ring,
            rollback,
            sinks,
            experts,
            top_k: top_k.min(experts),
            shards,
            pages,
            lanes,
        })
}

#[derive(Clone, Debug)]
enum Op {
    New,
    /// Sequences and tokens; layers done before the step is dropped; injected faults.
    Step {
        parts: Vec<(u8, u32)>,
        abort: Option<u8>,
        noise: bool,
    },
    Attend {
        sequence: u8,
        back: u32,
        rows: u32,
    },
    Rollback {
        sequence: u8,
        n: u32,
    },
    Fork {
        sequence: u8,
    },
    Drop {
        sequence: u8,
    },
    Evict {
        sequence: u8,
        pick: u32,
    },
    EvictAll {
        sequence: u8,
    },
    Clear {
        sequence: u8,
    },
}

fn tokens() -> impl Strategy<Value = u32> {
    prop_oneof![6 => Just(1u32), 4 => 1u32..=12, 4 => 10u32..=90, 1 => 90u32..=260]
}

fn op() -> impl Strategy<Value = Op> {
    let sequence = 0u8..4;
    let part = || (0u8..4, tokens());
    prop_oneof![
        1 => Just(Op::New),
        9 => (part(), any::<bool>()).prop_map(|(part, noise)| Op::Step { parts: vec![part], abort: None, noise }),
        3 => (proptest::collection::vec(part(), 1..=3), any::<bool>())
            .prop_map(|(parts, noise)| Op::Step { parts, abort: None, noise }),
        2 => (proptest::collection::vec(part(), 1..=2), 0u8..=5, any::<bool>())
            .prop_map(|(parts, at, noise)| Op::Step { parts, abort: Some(at), noise }),
        2 => (sequence.clone(), 0u32..=60, 1u32..=5).prop_map(|(sequence, back, rows)| Op::Attend { sequence, back, rows }),
        4 => (sequence.clone(), prop_oneof![4 => 0u32..=41, 1 => 0u32..=300])
            .prop_map(|(sequence, n)| Op::Rollback { sequence, n }),
        2 => sequence.clone().prop_map(|sequence| Op::Fork { sequence }),
        1 => sequence.clone().prop_map(|sequence| Op::Drop { sequence }),
        3 => (sequence.clone(), any::<u32>()).prop_map(|(sequence, pick)| Op::Evict { sequence, pick }),
        1 => sequence.clone().prop_map(|sequence| Op::EvictAll { sequence }),
        1 => sequence.prop_map(|sequence| Op::Clear { sequence }),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op(), 1..=24)
}

// ---- the model

#[derive(Clone, Debug)]
struct Token {
    nonce: u64,
    /// For each layer.
    experts: Vec<Vec<u16>>,
}

#[derive(Clone, Debug, Default)]
struct PageModel {
    positions: Vec<u32>,
    /// Evicted, or out of sight of every row that can still be asked.
    gone: bool,
}

#[derive(Clone, Debug, Default)]
struct RunModel {
    pages: Vec<PageModel>,
    evicted: bool,
}

#[derive(Clone, Debug)]
struct Model {
    tokens: Vec<Token>,
    /// First position that no rollback can take away.
    kept: u32,
    /// `[layer][head]`, the sinks and then each run of experts.
    runs: Vec<Vec<Vec<RunModel>>>,
    evicted: bool,
}

impl Model {
    fn new(setup: &Setup) -> Model {
        let head = || vec![RunModel::default(); setup.experts as usize + 1];
        let runs = setup.layers.iter().map(|l| (0..l.kv_heads).map(|_| head()).collect()).collect();
        Model { tokens: Vec::new(), kept: 0, runs, evicted: false }
    }

    fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    fn limit(&self, setup: &Setup) -> u32 {
        if self.kept == 0 { self.len() } else { self.len().saturating_sub(self.kept + setup.ring) }
    }

    /// Tokens `old..` were committed.
    fn committed(&mut self, setup: &Setup, old: u32) {
        let len = self.len();
        let (from, to) = (old.saturating_sub(setup.ring), len.saturating_sub(setup.ring));
        for (l, shape) in setup.layers.iter().enumerate() {
            let files = shape.window.is_none_or(|w| w > setup.ring);
            for p in from..to {
                let home = self.tokens[p as usize].experts[l][0];
                let run = usize::from(run(setup.experts, shape.window, p, home));
                let c = if p < setup.sinks { 0 } else { run + 1 };
                if c > 0 && !files {
                    continue;
                }
                for head in &mut self.runs[l] {
                    match head[c].pages.last_mut() {
                        Some(page) if !page.gone && page.positions.len() < PAGE as usize => {
                            page.positions.push(p)
                        }
                        _ => head[c].pages.push(PageModel { positions: vec![p], gone: false }),
                    }
                }
            }
            let Some(window) = shape.window else { continue };
            let seen = len.saturating_sub(window + setup.rollback);
            for run in self.runs[l].iter_mut().flat_map(|head| &mut head[1..]) {
                for page in run.pages.iter_mut().filter(|page| !page.gone) {
                    if page.positions.len() < PAGE as usize || page.positions[PAGE as usize - 1] >= seen {
                        break;
                    }
                    page.gone = true;
                }
            }
        }
        self.kept = self.kept.max(len.saturating_sub(setup.ring + setup.rollback));
    }

    fn rollback(&mut self, setup: &Setup, n: u32) {
        self.tokens.truncate((self.len() - n) as usize);
        let left = self.len().saturating_sub(setup.ring);
        for run in self.runs.iter_mut().flatten().flatten() {
            for page in &mut run.pages {
                page.positions.retain(|p| *p < left);
            }
            while run.pages.last().is_some_and(|page| page.positions.is_empty()) {
                run.pages.pop();
            }
        }
    }

    fn resident(&self, layer: usize, head: usize, position: u32) -> bool {
        let pages = self.runs[layer][head].iter().flat_map(|c| &c.pages);
        pages.filter(|page| !page.gone).any(|page| page.positions.contains(&position))
    }

    fn bytes(&self, setup: &Setup) -> u64 {
        let tiles = u64::from(self.len().div_ceil(PAGE) - if self.len() == 0 { 0 } else { self.kept / PAGE });
        let mut sum = 0;
        for (layer, heads) in setup.layers.iter().zip(&self.runs) {
            for head in heads {
                let pages = head.iter().flat_map(|c| &c.pages).filter(|page| !page.gone).count();
                sum += (tiles + pages as u64) * layer.layout.bytes();
            }
        }
        sum
    }
}

// ---- the oracle

fn turn(rope: Option<Rope>, row: &[f32], position: u32) -> Vec<f64> {
    let mut row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
    if let Some(rope) = rope {
        for i in 0..rope.rotary_dim as usize / 2 {
            let angle = f64::from(position) * rope.theta.powf(-2.0 * i as f64 / f64::from(rope.rotary_dim));
            let (a, b) = match rope.pairs {
                Pairs::Halves => (i, i + rope.rotary_dim as usize / 2),
                _ => (2 * i, 2 * i + 1),
            };
            let (x, y) = (row[a], row[b]);
            row[a] = x * angle.cos() - y * angle.sin();
            row[b] = y * angle.cos() + x * angle.sin();
        }
    }
    row
}

const SCALE: f32 = 0.4;

fn options(nonce: u64) -> Attend {
    let options = Attend::new(SCALE);
    match nonce % 5 {
        0 => options.softcap(3.0),
        1 => options.split(1),
        2 => options.split(4),
        _ => options,
    }
}

/// Checks one row of an output: all heads, values and log-sum-exp.
#[allow(clippy::too_many_arguments)]
fn check_row(
    setup: &Setup,
    model: &Model,
    layer: usize,
    position: u32,
    q: &[f32],
    options: &Attend,
    in_ring: impl Fn(u32) -> bool,
    out: &[f32],
    lse: &[f32],
) -> Result<(), TestCaseError> {
    let shape = &setup.layers[layer];
    let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
    let group = (shape.query_heads / shape.kv_heads) as usize;
    let lo = shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
    for head in 0..shape.kv_heads as usize {
        let seen: Vec<u32> = (0..model.len().min(position + 1))
            .filter(|&p| (p >= lo || p < setup.sinks) && (in_ring(p) || model.resident(layer, head, p)))
            .collect();
        let rows: Vec<(Vec<f64>, Vec<f32>)> = seen
            .iter()
            .map(|&p| {
                let nonce = model.tokens[p as usize].nonce;
                let k = stored(shape.layout.k, row(nonce, layer, head, Kind::Key, shape.layout.k_dim));
                let v = stored(shape.layout.v, row(nonce, layer, head, Kind::Value, shape.layout.v_dim));
                (turn(shape.rope, &k, p), v)
            })
            .collect();
        for h in head * group..(head + 1) * group {
            let q = turn(shape.rope, &q[h * k_dim..(h + 1) * k_dim], position);
            let (mut sum, mut acc) = (0.0, vec![0.0; v_dim]);
            for (k, v) in &rows {
                let mut score = f64::from(SCALE) * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                if let Some(cap) = options.softcap.map(f64::from) {
                    score = cap * (score / cap).tanh();
                }
                let p = score.exp();
                sum += p;
                acc.iter_mut().zip(v).for_each(|(a, v)| *a += p * f64::from(*v));
            }
            let out = &out[h * v_dim..(h + 1) * v_dim];
            if rows.is_empty() {
                prop_assert_eq!(bits(out), vec![0; v_dim], "layer {} row {} head {}", layer, position, h);
                prop_assert_eq!(lse[h], f32::NEG_INFINITY);
                continue;
            }
            let off = (f64::from(lse[h]) - sum.ln()).abs();
            prop_assert!(
                off <= 5e-6,
                "layer {layer} row {position} head {h}: lse {} want {}",
                lse[h],
                sum.ln()
            );
            for (got, want) in out.iter().zip(&acc) {
                let off = (f64::from(*got) - want / sum).abs();
                prop_assert!(off <= 3e-6, "layer {layer} row {position} head {h}: {got} want {}", want / sum);
            }
        }
    }
    Ok(())
}

/// Compares all that can be seen of a sequence.
fn check(setup: &Setup, cache: &Cache, sequence: &Sequence, model: &Model) -> Result<(), TestCaseError> {
    let len = model.len();
    prop_assert_eq!(sequence.next_position(), Position(len));
    prop_assert_eq!(sequence.in_ring(), Resident(len.min(setup.ring)));
    prop_assert_eq!(sequence.rollback_limit(), model.limit(setup));
    prop_assert!(sequence.rollback_limit() >= len.min(setup.rollback) || model.kept > 0);
    prop_assert_eq!(sequence.bytes(), model.bytes(setup));
    for (l, shape) in setup.layers.iter().enumerate() {
        let layout = shape.layout;
        let (mut key, mut value) = (vec![0.0; layout.k_dim as usize], vec![0.0; layout.v_dim as usize]);
        for head in 0..shape.kv_heads as usize {
            let mut want: Vec<(Place, usize, Vec<u32>, bool)> = Vec::new();
            for (c, run) in model.runs[l][head].iter().enumerate() {
                let place = if c == 0 { Place::Sinks } else { Place::Run(c as u16 - 1) };
                for (i, page) in run.pages.iter().enumerate().filter(|(_, page)| !page.gone) {
                    want.push((place, i, page.positions.clone(), !run.evicted));
                }
            }
            let filed: usize = want.iter().map(|(_, _, positions, _)| positions.len()).sum();
            prop_assert_eq!(
                sequence.resident(l, head).unwrap(),
                Resident(filed as u32 + len.min(setup.ring)),
                "layer {} head {}",
                l,
                head
            );
            let first = if len == 0 { 0 } else { model.kept / PAGE };
            for tile in first..len.div_ceil(PAGE) {
                let positions = (tile * PAGE..len.min((tile + 1) * PAGE)).collect();
                want.push((Place::Ring, tile as usize, positions, true));
            }
            let got: Vec<_> = sequence.pages(l, head).unwrap().collect();
            prop_assert_eq!(got.len(), want.len(), "layer {} head {}: {:?} want {:?}", l, head, got, want);
            let mut before: Option<PageId> = None;
            for (page, (place, ordinal, positions, exact)) in got.iter().zip(&want) {
                prop_assert_eq!(page.id.place, *place);
                if *exact {
                    prop_assert_eq!(page.id.ordinal as usize, *ordinal);
                }
                if let Some(before) = before.filter(|before| before.place == *place) {
                    prop_assert!(before.ordinal < page.id.ordinal);
                }
                before = Some(page.id);
                let block = u64::from(page.id.ordinal / 8);
                let counted = setup.layers[..l].iter().map(|layer| layer.kv_heads).sum::<u32>() + head as u32;
                let shard = match place {
                    Place::Run(e) => setup.shards.shard(block, u32::from(*e), counted),
                    _ => setup.shards.shared(block, counted),
                };
                prop_assert_eq!(page.shard, shard);
                prop_assert_eq!(page.tokens as usize, positions.len());
                prop_assert_eq!((page.first.0, page.last.0), (positions[0], positions[positions.len() - 1]));
                for (lane, &p) in positions.iter().enumerate() {
                    let at = sequence.read(l, head, page.id, lane as u32, &mut key, &mut value).unwrap();
                    prop_assert_eq!(at, Position(p));
                    let nonce = model.tokens[p as usize].nonce;
                    let k = stored(layout.k, row(nonce, l, head, Kind::Key, layout.k_dim));
                    let v = stored(layout.v, row(nonce, l, head, Kind::Value, layout.v_dim));
                    prop_assert_eq!(bits(&key), bits(&k), "key of {}", p);
                    prop_assert_eq!(bits(&value), bits(&v), "value of {}", p);
                }
                let past = sequence.read(l, head, page.id, page.tokens, &mut key, &mut value);
                prop_assert!(matches!(past, Err(Error::NoPage { .. })), "a lane past the last");
            }
        }
        if setup.experts > 1 {
            for p in 0..len {
                let tags: Option<Vec<u16>> = sequence.experts(l, Position(p)).unwrap().map(Iterator::collect);
                if let Some(tags) = tags {
                    prop_assert_eq!(&tags, &model.tokens[p as usize].experts[l]);
                } else {
                    prop_assert!(p < model.kept && shape.window.is_some(), "tags of {p} forgotten");
                }
            }
        }
        prop_assert!(sequence.experts(l, Position(len)).unwrap().is_none());
    }
    if !model.evicted {
        let (mut exact, mut most) = (0, 0);
        for (l, shape) in setup.layers.iter().enumerate() {
            let filed = model.runs[l][0][1..].iter();
            let filed = filed.map(|c| c.pages.iter().map(|page| page.positions.len() as u32).sum::<u32>());
            let store = cache.store(l).unwrap();
            exact += store.bytes_at(shape, len, filed);
            most += store.bytes_at_most(shape, len);
        }
        prop_assert!(sequence.bytes() <= exact, "{} bytes, bytes_at {exact}", sequence.bytes());
        prop_assert!(sequence.bytes() <= most, "{} bytes, at most {most}", sequence.bytes());
        let freed = model.runs.iter().flatten().flatten().flat_map(|c| &c.pages).any(|page| page.gone);
        if !freed && model.kept == len.saturating_sub(setup.ring + setup.rollback) {
            prop_assert_eq!(sequence.bytes(), exact);
        }
    }
    Ok(())
}

// ---- the machine

struct Machine<'a> {
    setup: &'a Setup,
    cache: Cache,
    live: Vec<(Sequence, Model)>,
    forked: bool,
    nonce: u64,
}

impl Machine<'_> {
    fn pick(&self, sequence: u8) -> usize {
        usize::from(sequence) % self.live.len()
    }

    fn token(&mut self) -> Token {
        self.nonce += 1;
        let nonce = self.nonce;
        let choose = |layer| {
            let first = mix(&[nonce, layer, 77]) % u64::from(self.setup.experts);
            // Some experts are rare.
            let first = if mix(&[nonce, layer, 78]).is_multiple_of(3) { first } else { first / 2 };
            let second = (first + 1) % u64::from(self.setup.experts);
            [first as u16, second as u16][..self.setup.top_k as usize].to_vec()
        };
        Token { nonce, experts: (0..self.setup.layers.len() as u64).map(choose).collect() }
    }

    fn step(&mut self, parts: &[(u8, u32)], abort: Option<u8>, noise: bool) -> Result<(), TestCaseError> {
        let setup = self.setup;
        let mut chosen: Vec<(usize, u32)> = Vec::new();
        for &(sequence, n) in parts {
            let i = self.pick(sequence);
            if chosen.iter().all(|(j, _)| *j != i) && self.live[i].1.len() + n <= LONGEST {
                chosen.push((i, n));
            }
        }
        chosen.sort_unstable();
        if chosen.is_empty() {
            return Ok(());
        }
        let olds: Vec<u32> = chosen.iter().map(|(i, _)| self.live[*i].1.len()).collect();
        for &(i, n) in &chosen {
            for _ in 0..n {
                let token = self.token();
                self.live[i].1.tokens.push(token);
            }
        }
        let before = self.cache.usage();
        let nonce = self.nonce;
        let of = |i: usize| chosen.iter().find(|(j, _)| *j == i).map(|(_, n)| *n);
        let parts = self.live.iter().enumerate().filter_map(|(i, (s, _))| Some((s, of(i)?)));
        let asked = self.cache.step_bytes(parts).unwrap();
        let (sequences, models): (Vec<_>, Vec<_>) = self.live.iter_mut().map(|(s, m)| (s, m)).unzip();
        let mut models: Vec<&mut Model> = models
            .into_iter()
            .enumerate()
            .filter(|(i, _)| chosen.iter().any(|(j, _)| i == j))
            .map(|(_, m)| m)
            .collect();
        let counts = sequences.into_iter().enumerate().filter_map(|(i, s)| Some((s, of(i)?)));
        let done = match self.cache.begin(counts) {
            Ok(step) => {
                prop_assert_eq!(self.cache.usage().taken - before.taken, asked.needed);
                Self::fill(setup, step, &models, &olds, nonce, abort, noise)?
            }
            Err(Error::OutOfBudget { needed, available }) => {
                prop_assert_eq!((needed, available), (asked.needed, asked.available));
                prop_assert!(setup.pages.is_some());
                prop_assert!(needed > available);
                prop_assert_eq!(available, before.budget - before.taken);
                prop_assert_eq!(&self.cache.usage(), &before);
                false
            }
            Err(other) => panic!("{other}"),
        };
        for (model, &old) in models.iter_mut().zip(&olds) {
            if done {
                model.committed(setup, old);
            } else {
                model.tokens.truncate(old as usize);
            }
        }
        if !done && !self.forked {
            prop_assert_eq!(self.cache.usage(), before);
        }
        Ok(())
    }

    /// Runs a step that has begun: whether it was committed.
    fn fill(
        setup: &Setup,
        mut step: Step<'_>,
        models: &[&mut Model],
        olds: &[u32],
        nonce: u64,
        abort: Option<u8>,
        noise: bool,
    ) -> Result<bool, TestCaseError> {
        let fresh: Vec<(usize, u32)> =
            models.iter().enumerate().flat_map(|(i, m)| (olds[i]..m.len()).map(move |p| (i, p))).collect();
        prop_assert_eq!(step.rows(), fresh.len());
        let mut countdown = abort;
        let mut stop = || match &mut countdown {
            Some(0) => true,
            Some(n) => {
                *n -= 1;
                false
            }
            None => false,
        };
        for (l, shape) in setup.layers.iter().enumerate() {
            if stop() {
                return Ok(false);
            }
            let (mut k, mut v, mut q) = (Vec::new(), Vec::new(), Vec::new());
            let mut chosen: Vec<u16> = Vec::new();
            for &(i, p) in &fresh {
                let token = &models[i].tokens[p as usize];
                for head in 0..shape.kv_heads as usize {
                    k.extend(row(token.nonce, l, head, Kind::Key, shape.layout.k_dim));
                    v.extend(row(token.nonce, l, head, Kind::Value, shape.layout.v_dim));
                }
                for head in 0..shape.query_heads as usize {
                    q.extend(row(token.nonce, l, head, Kind::Query, shape.layout.k_dim));
                }
                chosen.extend(&token.experts[l]);
            }
            let early = mix(&[nonce, l as u64]).is_multiple_of(3);
            let (rows, heads) = (fresh.len(), shape.query_heads as usize);
            let v_dim = shape.layout.v_dim as usize;
            let (mut out, mut lse) = (vec![f32::NAN; rows * heads * v_dim], vec![f32::NAN; rows * heads]);
            let options = options(nonce);
            if noise {
                // Refused calls on the way must leave no trace.
                let mut bad = v.clone();
                let last = bad.len() - 1;
                bad[last] = f32::NAN;
                let refused = matches!(step.append(l, &k, &bad), Err(Error::Unstorable { what: "v", .. }));
                prop_assert!(refused);
                prop_assert!(
                    matches!(step.append(l, &k[1..], &v), Err(Error::Length { what: "k", .. })),
                    "a short k"
                );
                let mut wild = chosen.clone();
                wild[0] = setup.experts as u16;
                prop_assert!(matches!(step.route(l, &wild), Err(Error::Expert { .. })), "a wild expert");
                let early = step.attend(l, &q, &options, AttendOutput::new(&mut out));
                prop_assert!(matches!(early, Err(Error::NotAppended { .. })), "attended too early");
            }
            if early {
                step.route(l, &chosen).unwrap();
            }
            step.append(l, &k, &v).unwrap();
            if stop() {
                return Ok(false);
            }
            step.attend(l, &q, &options, AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
            for (at, &(i, p)) in fresh.iter().enumerate() {
                let (model, old) = (&*models[i], olds[i]);
                let edge =
                    p == old || p + 1 == model.len() || p + 1 == old + setup.ring || p == old + setup.ring;
                if !edge && !mix(&[nonce, u64::from(p)]).is_multiple_of(1 + u64::from(model.len() - old) / 4)
                {
                    continue;
                }
                let unfiled = old.saturating_sub(setup.ring);
                let width = shape.layout.k_dim as usize * heads;
                check_row(
                    setup,
                    model,
                    l,
                    p,
                    &q[at * width..(at + 1) * width],
                    &options,
                    |p| p >= unfiled,
                    &out[at * heads * v_dim..(at + 1) * heads * v_dim],
                    &lse[at * heads..(at + 1) * heads],
                )?;
            }
            prop_assert!(out.iter().chain(&lse).all(|x| !x.is_nan()));
            if !early && (setup.experts > 1 || nonce.is_multiple_of(2)) {
                step.route(l, &chosen).unwrap();
            }
        }
        if stop() {
            return Ok(false);
        }
        step.commit().unwrap();
        Ok(true)
    }

    fn attend(&mut self, i: usize, back: u32, rows: u32) -> Result<(), TestCaseError> {
        let setup = self.setup;
        let (sequence, model) = &self.live[i];
        let len = model.len();
        self.nonce += 1;
        let oldest = len.saturating_sub(model.limit(setup).saturating_add(1));
        let first = len.saturating_sub(back);
        let options = options(self.nonce);
        for (l, shape) in setup.layers.iter().enumerate() {
            let (heads, v_dim) = (shape.query_heads as usize, shape.layout.v_dim as usize);
            let width = heads * shape.layout.k_dim as usize;
            let n = rows as usize;
            let q: Vec<f32> = (0..n)
                .flat_map(|r| row(self.nonce + r as u64 * 1_000_003, l, 9, Kind::Query, width as u32))
                .collect();
            let (mut out, mut lse) = (vec![f32::NAN; n * heads * v_dim], vec![f32::NAN; n * heads]);
            let ask = Rows::new(sequence, Position(first), rows);
            let result =
                self.cache.attend(l, &[ask], &q, &options, AttendOutput::new(&mut out).lse(&mut lse));
            if first < oldest || first + rows > len + 1 {
                let want = Error::QueryPosition {
                    first: u64::from(first),
                    end: u64::from(first + rows),
                    oldest,
                    len,
                };
                prop_assert_eq!(result, Err(want));
                continue;
            }
            prop_assert_eq!(result, Ok(()));
            for r in 0..n {
                let position = first + r as u32;
                check_row(
                    setup,
                    model,
                    l,
                    position,
                    &q[r * width..(r + 1) * width],
                    &options,
                    |p| p + setup.ring > position || p >= len.saturating_sub(setup.ring),
                    &out[r * heads * v_dim..(r + 1) * heads * v_dim],
                    &lse[r * heads..(r + 1) * heads],
                )?;
            }
        }
        Ok(())
    }

    fn evict(&mut self, i: usize, pick: u32) -> Result<(), TestCaseError> {
        let setup = self.setup;
        let (sequence, model) = &mut self.live[i];
        let layer = pick as usize % setup.layers.len();
        let head = (pick >> 4) as usize % setup.layers[layer].kv_heads as usize;
        let pages: Vec<_> = sequence.pages(layer, head).unwrap().collect();
        if pages.is_empty() {
            return Ok(());
        }
        // Often the last page of a run.
        let page = pages[(pick >> 8) as usize % pages.len()];
        let got = sequence.evict(layer, head, page.id);
        let c = match page.id.place {
            Place::Ring => {
                prop_assert_eq!(got, Err(Error::Pinned { page: page.id }));
                return Ok(());
            }
            Place::Sinks => 0,
            Place::Run(e) => usize::from(e) + 1,
            other => panic!("{other}"),
        };
        prop_assert_eq!(got, Ok(()));
        let again = sequence.evict(layer, head, page.id);
        prop_assert_eq!(again, Err(Error::NoPage { layer, kv_head: head, page: page.id }));
        let run = &mut model.runs[layer][head][c];
        let entry = run.pages.iter_mut().find(|p| !p.gone && p.positions.first() == Some(&page.first.0));
        entry.unwrap().gone = true;
        run.evicted = true;
        model.evicted = true;
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let setup = self.setup;
        match *op {
            Op::New if self.live.len() < 4 => self.live.push((self.cache.sequence(), Model::new(setup))),
            Op::New => {}
            Op::Step { ref parts, abort, noise } => self.step(parts, abort, noise)?,
            Op::Attend { sequence, back, rows } => self.attend(self.pick(sequence), back, rows)?,
            Op::Rollback { sequence, n } => {
                let i = self.pick(sequence);
                let (sequence, model) = &mut self.live[i];
                let limit = model.limit(setup);
                let got = sequence.rollback(n);
                if n > limit {
                    prop_assert_eq!(got, Err(Error::RollbackTooFar { asked: n, limit }));
                } else {
                    prop_assert_eq!(got, Ok(()));
                    model.rollback(setup, n);
                }
            }
            Op::Fork { sequence } if self.live.len() < 4 => {
                let (sequence, model) = &self.live[self.pick(sequence)];
                let before = self.cache.usage();
                let twin = (sequence.fork(), model.clone());
                prop_assert_eq!(self.cache.usage(), before);
                self.live.push(twin);
                self.forked = true;
            }
            Op::Drop { sequence } if self.live.len() > 1 => drop(self.live.remove(self.pick(sequence))),
            Op::Fork { .. } | Op::Drop { .. } => {}
            Op::Evict { sequence, pick } => self.evict(self.pick(sequence), pick)?,
            Op::EvictAll { sequence } => {
                let i = self.pick(sequence);
                let (sequence, model) = &mut self.live[i];
                sequence.evict_all();
                for run in model.runs.iter_mut().flatten().flatten() {
                    run.evicted |= !run.pages.is_empty();
                    run.pages.iter_mut().for_each(|page| page.gone = true);
                }
                model.evicted = true;
            }
            Op::Clear { sequence } => {
                let i = self.pick(sequence);
                self.live[i].0.clear();
                self.live[i].1 = Model::new(setup);
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for (sequence, model) in &self.live {
            check(self.setup, &self.cache, sequence, model)?;
        }
        let Usage { shards, taken, budget, .. } = self.cache.usage();
        let sum: u64 = self.live.iter().map(|(sequence, _)| sequence.bytes()).sum();
        prop_assert_eq!(shards.iter().sum::<u64>(), taken);
        prop_assert!(taken <= budget);
        prop_assert!(taken <= sum);
        if !self.forked {
            prop_assert_eq!(taken, sum);
        }
        if let [(sequence, _)] = &self.live[..] {
            prop_assert_eq!(taken, sum);
            let mut by_shard = vec![0; shards.len()];
            for (l, shape) in self.setup.layers.iter().enumerate() {
                for head in 0..shape.kv_heads as usize {
                    for page in sequence.pages(l, head).unwrap() {
                        prop_assert!(!page.shared);
                        by_shard[page.shard as usize] += shape.layout.bytes();
                    }
                }
            }
            prop_assert_eq!(shards, by_shard);
        }
        Ok(())
    }
}

fn history(setup: &Setup, ops: &[Op]) -> Result<(), TestCaseError> {
    let cache = setup.cache();
    let live = vec![(cache.sequence(), Model::new(setup))];
    let mut machine = Machine { setup, cache, live, forked: false, nonce: 0 };
    for op in ops {
        machine.apply(op)?;
        machine.check()?;
    }
    let Machine { cache, live, .. } = machine;
    drop(live);
    let usage = cache.usage();
    prop_assert_eq!(usage.taken, 0);
    prop_assert!(usage.shards.iter().all(|bytes| *bytes == 0));
    Ok(())
}

// ---- twins

/// Adds tokens in one step; the outputs of all layers.
fn feed(setup: &Setup, cache: &Cache, sequence: &mut Sequence, tokens: &[Token]) -> Vec<Vec<u32>> {
    let rows = tokens.len();
    let mut step = cache.begin([(sequence, rows as u32)]).unwrap();
    let mut outputs = Vec::new();
    for (l, shape) in setup.layers.iter().enumerate() {
        let Layout { k_dim, v_dim, .. } = shape.layout;
        let heads = shape.query_heads as usize;
        let of = |kind, heads: u32, dim| -> Vec<f32> {
            let row = |t: &Token| {
                (0..heads as usize).flat_map(|h| row(t.nonce, l, h, kind, dim)).collect::<Vec<_>>()
            };
            tokens.iter().flat_map(row).collect()
        };
        let (mut out, mut lse) = (vec![0.0; rows * heads * v_dim as usize], vec![0.0; rows * heads]);
        step.append(l, &of(Kind::Key, shape.kv_heads, k_dim), &of(Kind::Value, shape.kv_heads, v_dim))
            .unwrap();
        let q = of(Kind::Query, shape.query_heads, k_dim);
        step.attend(l, &q, &Attend::new(SCALE), AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        let experts: Vec<u16> = tokens.iter().flat_map(|t| t.experts[l].clone()).collect();
        step.route(l, &experts).unwrap();
        outputs.extend([bits(&out), bits(&lse)]);
    }
    step.commit().unwrap();
    outputs
}

/// Outputs of the rows `first..=len`, by all layers.
fn look(setup: &Setup, cache: &Cache, sequence: &Sequence, first: u32) -> Vec<Vec<u32>> {
    let rows = sequence.next_position().0 + 1 - first;
    let mut outputs = Vec::new();
    for (l, shape) in setup.layers.iter().enumerate() {
        let heads = shape.query_heads as usize;
        let n = rows as usize * heads;
        let q = row(u64::from(first), l, 3, Kind::Query, n as u32 * shape.layout.k_dim);
        let (mut out, mut lse) = (vec![0.0; n * shape.layout.v_dim as usize], vec![0.0; n]);
        let ask = Rows::new(sequence, Position(first), rows);
        cache.attend(l, &[ask], &q, &Attend::new(SCALE), AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        outputs.extend([bits(&out), bits(&lse)]);
    }
    outputs
}

/// Asserts that `a`, which once had `most` tokens, shows the same as `b`, which never had them. `a` may lack pages that no row of it
/// reads: tiles before its first, and full pages behind its windows.
fn same(
    setup: &Setup,
    (ca, a): (&Cache, &Sequence),
    (cb, b): (&Cache, &Sequence),
    most: u32,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(a.next_position(), b.next_position());
    prop_assert_eq!(a.in_ring(), b.in_ring());
    prop_assert!(a.rollback_limit() <= b.rollback_limit());
    let kept = most.saturating_sub(setup.ring + setup.rollback);
    let mut lacks = 0;
    for (l, shape) in setup.layers.iter().enumerate() {
        let (mut key, mut value) =
            (vec![0.0; shape.layout.k_dim as usize], vec![0.0; shape.layout.v_dim as usize]);
        for head in 0..shape.kv_heads as usize {
            let mut mine = a.pages(l, head).unwrap().peekable();
            for theirs in b.pages(l, head).unwrap() {
                let Some(page) = mine.next_if_eq(&theirs) else {
                    let left = match (theirs.id.place, shape.window) {
                        (Place::Ring, _) => theirs.id.ordinal < kept / PAGE,
                        (Place::Run(_), Some(w)) => {
                            theirs.tokens == PAGE && theirs.last.0 + w + setup.rollback < most
                        }
                        _ => false,
                    };
                    prop_assert!(left, "layer {} head {}: {:?} is missing", l, head, theirs);
                    lacks += shape.layout.bytes();
                    continue;
                };
                for lane in 0..page.tokens {
                    let p = a.read(l, head, page.id, lane, &mut key, &mut value).unwrap();
                    let mine = (p, bits(&key), bits(&value));
                    let p = b.read(l, head, page.id, lane, &mut key, &mut value).unwrap();
                    prop_assert_eq!(mine, (p, bits(&key), bits(&value)));
                }
            }
            prop_assert_eq!(mine.next(), None);
        }
        for p in 0..=a.next_position().0 {
            let tags = |s: &Sequence| s.experts(l, Position(p)).unwrap().map(Iterator::collect::<Vec<_>>);
            let (mine, theirs) = (tags(a), tags(b));
            prop_assert!(mine == theirs || (mine.is_none() && p < kept), "tags of {}", p);
        }
    }
    prop_assert_eq!(a.bytes() + lacks, b.bytes());
    prop_assert_eq!(ca.usage().taken, a.bytes());
    prop_assert_eq!(cb.usage().taken, b.bytes());
    let oldest = a.next_position().0.saturating_sub(a.rollback_limit().saturating_add(1));
    prop_assert_eq!(look(setup, ca, a, oldest), look(setup, cb, b, oldest));
    Ok(())
}

/// `a` takes chunks, then more tokens, and rolls those back; `b` takes the same tokens one by one and never the others. Then both take
/// more. `picks` evict the same pages of both after each chunk.
fn twins(
    setup: &Setup,
    chunks: &[u32],
    picks: &[u32],
    extra: &[u32],
    back: u32,
    rest: &[u32],
) -> Result<(), TestCaseError> {
    let (ca, cb) = (setup.cache(), setup.cache());
    let (mut a, mut b) = (ca.sequence(), cb.sequence());
    let mut machine = Machine { setup, cache: setup.cache(), live: Vec::new(), forked: false, nonce: 0 };
    let mut draw = |n: u32| -> Vec<Token> { (0..n).map(|_| machine.token()).collect() };
    let mut most = 0;
    for (i, &n) in chunks.iter().enumerate() {
        let tokens = draw(n);
        let whole = feed(setup, &ca, &mut a, &tokens);
        let parts: Vec<_> =
            tokens.iter().map(|t| feed(setup, &cb, &mut b, std::slice::from_ref(t))).collect();
        if n <= setup.ring {
            // A row's bits do not depend on how tokens were cut into steps.
            for (j, whole) in whole.iter().enumerate() {
                let parts: Vec<u32> = parts.iter().flat_map(|part| part[j].clone()).collect();
                prop_assert_eq!(whole, &parts);
            }
        }
        most += n;
        same(setup, (&ca, &a), (&cb, &b), most)?;
        let Some(pick) = picks.get(i) else { continue };
        let pages: Vec<_> = a.pages(0, 0).unwrap().filter(|page| page.id.place != Place::Ring).collect();
        if !pages.is_empty() {
            let page = pages[*pick as usize % pages.len()].id;
            a.evict(0, 0, page).unwrap();
            b.evict(0, 0, page).unwrap();
        }
    }
    let (len, snapshot) = (most, look(setup, &ca, &a, most));
    let mut budget = setup.rollback.max((setup.ring + setup.rollback).saturating_sub(len));
    let mut kept = draw(extra.iter().sum());
    let mut added = 0;
    for &n in extra {
        let n = n.min(budget) as usize;
        if n > 0 {
            feed(setup, &ca, &mut a, &kept[added..added + n]);
        }
        added += n;
        budget -= n as u32;
    }
    kept.truncate(added);
    most = most.max(len + added as u32);
    // All of the extra tokens, or a few fewer, which `b` then gets too.
    let stay = added - (back as usize).min(added);
    let stay = if back.is_multiple_of(2) { 0 } else { stay };
    a.rollback((added - stay) as u32).unwrap();
    kept[..stay].iter().for_each(|t| drop(feed(setup, &cb, &mut b, std::slice::from_ref(t))));
    if stay == 0 {
        prop_assert_eq!(look(setup, &ca, &a, len), snapshot);
    }
    same(setup, (&ca, &a), (&cb, &b), most)?;
    for &n in rest {
        let tokens = draw(n);
        prop_assert_eq!(feed(setup, &ca, &mut a, &tokens), feed(setup, &cb, &mut b, &tokens));
        most = most.max(a.next_position().0);
        same(setup, (&ca, &a), (&cb, &b), most)?;
    }
    Ok(())
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { max_shrink_iters: 20_000, ..pikv_test::cases(cases / 2, cases) }
}

proptest! {
    #![proptest_config(cases(700))]

    /// A dense model: one expert, no windows.
    #[test]
    fn dense_histories(setup in setup(1, false, false), ops in ops()) {
        history(&setup, &ops)?;
    }

    /// Several experts, no windows.
    #[test]
    fn expert_histories(setup in setup(5, false, false), ops in ops()) {
        history(&setup, &ops)?;
    }

    /// So many experts that they share runs.
    #[test]
    fn sharing_histories(experts in 9u32..=40, setup in setup(1, true, false), ops in ops()) {
        let top_k = 1 + setup.ring % 2;
        history(&Setup { experts, top_k, ..setup }, &ops)?;
    }

    /// Sliding windows below, at and above the ring, one layer or two.
    #[test]
    fn window_histories(setup in setup(5, true, false), ops in ops()) {
        history(&setup, &ops)?;
    }

    /// A budget of 2 to 40 pages a head: steps are refused, and nothing is lost.
    #[test]
    fn tight_histories(setup in setup(5, true, true), ops in ops()) {
        history(&setup, &ops)?;
    }

    /// After a rollback, pages, bytes, tags and the bits of every output are those of a sequence that never had the tokens. A chunk has the
    /// outputs of its tokens one by one.
    #[test]
    fn rollback_leaves_no_trace(
        setup in setup(4, true, false),
        chunks in proptest::collection::vec(tokens(), 1..=4),
        picks in proptest::collection::vec(any::<u32>(), 0..=2),
        extra in proptest::collection::vec(1u32..=30, 1..=4),
        back in 0u32..=40,
        rest in proptest::collection::vec(1u32..=70, 0..=3),
    ) {
        twins(&setup, &chunks, &picks, &extra, back, &rest)?;
    }
}
