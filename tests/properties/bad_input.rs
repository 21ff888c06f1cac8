//! Bad input, case by case: the typed error, the rejected value in its text, and a cache that works as before.

use pikv::lanes::{Lanes, LanesError};
use pikv::report::{PageId, PageInfo, Place};
use pikv::shard::{ShardError, ShardMap};
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ConfigError, Dtype, Error, LayerShape, Layout, Position, Rope,
    Rows, Sequence, Step,
};

/// Two layers of different heads, widths and dtypes; 3 experts, 2 of them a token; a ring of 8, 4 of rollback.
fn config() -> CacheConfig {
    let first = LayerShape::new(2, 4, 3, Dtype::F16).values(5, Dtype::Bf16);
    let second = LayerShape::new(1, 1, 2, Dtype::F32).window(6);
    CacheConfig::new(vec![first, second], BUDGET).ring(8).rollback(4).sinks(1).experts(3, 2).nan_fill(true)
}

const BUDGET: u64 = 100_000;
/// Tokens of the sequence that the cases work on.
const LEN: u32 = 40;
/// Elements of `k`, `v`, `q`, `out` and `lse` of layer 0, for a step of 2 rows.
const K: usize = 12;
const V: usize = 20;
const Q: usize = 24;
const OUT: usize = 40;
const LSE: usize = 8;

/// Appends `n` rows and commits; the outputs.
fn good(cache: &Cache, sequence: &mut Sequence, n: usize) -> Vec<u32> {
    let at = sequence.next_position().0 as usize;
    let row = |i: usize| ((at * 7 + i * 13) % 19) as f32 / 19.0 - 0.5;
    let mut step = cache.begin([(sequence, n as u32)]).unwrap();
    let mut outputs = Vec::new();
    for (l, shape) in cache.config().layers.iter().enumerate() {
        let fill = |x: u32| (0..n * x as usize).map(row).collect::<Vec<f32>>();
        let Layout { k_dim, v_dim, .. } = shape.layout;
        step.append(l, &fill(shape.kv_heads * k_dim), &fill(shape.kv_heads * v_dim)).unwrap();
        let mut out = fill(shape.query_heads * v_dim);
        step.attend(l, &fill(shape.query_heads * k_dim), &Attend::new(0.5), AttendOutput::new(&mut out))
            .unwrap();
        step.route(l, &(0..n).flat_map(|i| [i as u16 % 3, (i as u16 + 1) % 3]).collect::<Vec<_>>()).unwrap();
        outputs.extend(out.iter().map(|x| x.to_bits()));
    }
    step.commit().unwrap();
    outputs
}

type Seen = Vec<(PageInfo, Vec<(Position, Vec<u32>)>)>;

fn seen(cache: &Cache, sequence: &Sequence) -> Seen {
    let mut all = Vec::new();
    for (l, shape) in cache.config().layers.iter().enumerate() {
        let (mut k, mut v) = (vec![0.0; shape.layout.k_dim as usize], vec![0.0; shape.layout.v_dim as usize]);
        for head in 0..shape.kv_heads as usize {
            for page in sequence.pages(l, head).unwrap() {
                let mut read = |lane| {
                    let p = sequence.read(l, head, page.id, lane, &mut k, &mut v).unwrap();
                    (p, k.iter().chain(&v).map(|x| x.to_bits()).collect())
                };
                all.push((page, (0..page.tokens).map(&mut read).collect()));
            }
        }
    }
    all
}

type Run = fn(&Cache, &mut Sequence) -> Result<(), Error>;
type Case = (&'static str, Run, Error, &'static [&'static str]);

fn begin<'a>(cache: &Cache, sequence: &'a mut Sequence) -> Step<'a> {
    cache.begin([(sequence, 2)]).unwrap()
}

fn append(cache: &Cache, sequence: &mut Sequence, k: &[f32], v: &[f32]) -> Result<(), Error> {
    begin(cache, sequence).append(0, k, v)
}

/// `n` numbers, one of them `x`.
fn with(n: usize, at: usize, x: f32) -> Vec<f32> {
    let mut row = vec![0.25; n];
    row[at] = x;
    row
}

/// Attends layer 0 in a step of 2 rows.
fn attend(
    cache: &Cache,
    sequence: &mut Sequence,
    q: &[f32],
    options: Attend,
    sizes: [usize; 2],
) -> Result<(), Error> {
    let mut step = begin(cache, sequence);
    step.append(0, &[0.0; K], &[0.0; V]).unwrap();
    let (mut out, mut lse) = (vec![0.0; sizes[0]], vec![0.0; sizes[1]]);
    step.attend(0, q, &options, AttendOutput::new(&mut out).lse(&mut lse))
}

/// Attends `rows` rows from `first`, outside a step.
fn ask(cache: &Cache, sequence: &Sequence, layer: usize, first: u32, rows: u32) -> Result<(), Error> {
    let n = rows as usize % 1000;
    let parts = [Rows::new(sequence, Position(first), rows)];
    cache.attend(
        layer,
        &parts,
        &vec![0.0; n * 12],
        &Attend::new(0.5),
        AttendOutput::new(&mut vec![0.0; n * 20]),
    )
}

fn read(sequence: &Sequence, place: Place, ordinal: u32, lane: u32) -> Result<(), Error> {
    sequence.read(0, 1, PageId { place, ordinal }, lane, &mut [0.0; 3], &mut [0.0; 5]).map(drop)
}

const fn page(place: Place, ordinal: u32) -> PageId {
    PageId { place, ordinal }
}

const fn length(what: &'static str, got: usize, expected: usize, shape: &'static str) -> Error {
    Error::Length { what, got, expected, shape }
}

#[rustfmt::skip]
fn calls() -> Vec<Case> {
    let k = |row, kv_head, channel, value| Error::Unstorable { what: "k", layer: 0, kv_head, row, channel, value, dtype: "f16", limit: 65504.0 };
    let v = |row, kv_head, channel, value| Error::Unstorable { what: "v", layer: 0, kv_head, row, channel, value, dtype: "bf16", limit: f32::from_bits(0x7f7f_0000) };
    let q = |row, head, channel, value| Error::Query { layer: 0, row, head, channel, value };
    let no_page = |kv_head, page| Error::NoPage { layer: 0, kv_head, page };
    let rows = |first, end| Error::QueryPosition { first, end, oldest: 35, len: 40 };
    vec![
        // Lengths.
        ("k short", |c, s| append(c, s, &[0.0; K - 1], &[0.0; V]), length("k", 11, 12, "rows * kv_heads * k_dim"), &["k:", "11", "12"]),
        ("k long", |c, s| append(c, s, &[0.0; K + 1], &[0.0; V]), length("k", 13, 12, "rows * kv_heads * k_dim"), &["13", "12"]),
        ("k empty", |c, s| append(c, s, &[], &[0.0; V]), length("k", 0, 12, "rows * kv_heads * k_dim"), &["0", "12"]),
        ("v short", |c, s| append(c, s, &[0.0; K], &[0.0; V - 1]), length("v", 19, 20, "rows * kv_heads * v_dim"), &["v:", "19", "20"]),
        ("v long", |c, s| append(c, s, &[0.0; K], &[0.0; V + 5]), length("v", 25, 20, "rows * kv_heads * v_dim"), &["25", "20"]),
        ("q short", |c, s| attend(c, s, &[0.0; Q - 3], Attend::new(1.0), [OUT, LSE]), length("q", 21, 24, "rows * query_heads * k_dim"), &["q:", "21", "24"]),
        ("q long", |c, s| attend(c, s, &[0.0; Q + 1], Attend::new(1.0), [OUT, LSE]), length("q", 25, 24, "rows * query_heads * k_dim"), &["25", "24"]),
        ("out short", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0), [OUT - 1, LSE]), length("out", 39, 40, "rows * query_heads * v_dim"), &["out:", "39", "40"]),
        ("out long", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0), [OUT + 5, LSE]), length("out", 45, 40, "rows * query_heads * v_dim"), &["45", "40"]),
        ("lse short", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0), [OUT, LSE - 1]), length("lse", 7, 8, "rows * query_heads"), &["lse:", "7", "8"]),
        ("lse long", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0), [OUT, 2 * LSE]), length("lse", 16, 8, "rows * query_heads"), &["16", "8"]),
        ("experts short", |c, s| begin(c, s).route(0, &[0, 1, 2]), length("experts", 3, 4, "rows * top_k"), &["experts:", "3", "4"]),
        ("experts long", |c, s| begin(c, s).route(0, &[0, 1, 2, 1, 0, 1]), length("experts", 6, 4, "rows * top_k"), &["6", "4"]),
        ("key buffer", |_, s| s.read(0, 0, page(Place::Ring, 1), 0, &mut [0.0; 2], &mut [0.0; 5]).map(drop), length("key", 2, 3, "k_dim"), &["key:", "2", "3"]),
        ("value buffer", |_, s| s.read(0, 0, page(Place::Ring, 1), 0, &mut [0.0; 3], &mut [0.0; 6]).map(drop), length("value", 6, 5, "v_dim"), &["value:", "6", "5"]),
        // Values.
        ("k NaN", |c, s| append(c, s, &with(K, 7, f32::NAN), &[0.0; V]), k(1, 0, 1, f32::NAN), &["k of", "NaN", "row 1", "channel 1"]),
        ("k inf", |c, s| append(c, s, &with(K, 5, f32::INFINITY), &[0.0; V]), k(0, 1, 2, f32::INFINITY), &["inf", "KV head 1", "channel 2"]),
        ("k -inf", |c, s| append(c, s, &with(K, 0, f32::NEG_INFINITY), &[0.0; V]), k(0, 0, 0, f32::NEG_INFINITY), &["-inf"]),
        ("k past f16", |c, s| append(c, s, &with(K, 11, 70000.0), &[0.0; V]), k(1, 1, 2, 70000.0), &["70000", "f16"]),
        ("k rounds past f16", |c, s| append(c, s, &with(K, 2, -65520.0), &[0.0; V]), k(0, 0, 2, -65520.0), &["-65520", "f16"]),
        ("v NaN", |c, s| append(c, s, &[0.0; K], &with(V, 19, f32::NAN)), v(1, 1, 4, f32::NAN), &["v of", "NaN", "channel 4"]),
        ("v -inf", |c, s| append(c, s, &[0.0; K], &with(V, 10, f32::NEG_INFINITY)), v(1, 0, 0, f32::NEG_INFINITY), &["-inf", "row 1"]),
        ("v rounds past bf16", |c, s| append(c, s, &[0.0; K], &with(V, 3, f32::MAX)), v(0, 0, 3, f32::MAX), &["340282350000000000000000000000000000000", "bf16"]),
        ("f32 inf", |c, s| begin(c, s).append(1, &with(4, 3, f32::INFINITY), &[0.0; 4]),
            Error::Unstorable { what: "k", layer: 1, kv_head: 0, row: 1, channel: 1, value: f32::INFINITY, dtype: "f32", limit: f32::MAX }, &["layer 1", "inf", "f32"]),
        ("q NaN", |c, s| attend(c, s, &with(Q, 23, f32::NAN), Attend::new(1.0), [OUT, LSE]), q(1, 3, 2, f32::NAN), &["NaN", "row 1", "query head 3", "channel 2"]),
        ("q inf", |c, s| attend(c, s, &with(Q, 4, f32::INFINITY), Attend::new(1.0), [OUT, LSE]), q(0, 1, 1, f32::INFINITY), &["inf", "query head 1"]),
        ("q -inf outside a step", |c, s| {
            let rows = [Rows::new(s, Position(LEN - 1), 1)];
            c.attend(0, &rows, &with(12, 6, f32::NEG_INFINITY), &Attend::new(1.0), AttendOutput::new(&mut [0.0; 20]))
        }, q(0, 2, 0, f32::NEG_INFINITY), &["-inf", "query head 2"]),
        ("scores past 2^24", |c, s| {
            let mut step = begin(c, s);
            step.append(1, &[30_000.0; 4], &[0.0; 4]).unwrap();
            step.attend(1, &[10_000.0; 4], &Attend::new(2.0), AttendOutput::new(&mut [0.0; 4]))
        }, Error::ScoreOverflow { layer: 1, row: 0, head: 0, scale: 2.0 }, &["layer 1", "2^24", "scale 2"]),
        // Options.
        ("scale NaN", |c, s| attend(c, s, &[0.0; Q], Attend::new(f32::NAN), [OUT, LSE]), Error::Scale(f32::NAN), &["NaN"]),
        ("scale 0", |c, s| attend(c, s, &[0.0; Q], Attend::new(0.0), [OUT, LSE]), Error::Scale(0.0), &["scale 0:"]),
        ("scale negative", |c, s| attend(c, s, &[0.0; Q], Attend::new(-0.125), [OUT, LSE]), Error::Scale(-0.125), &["-0.125"]),
        ("scale inf", |c, s| attend(c, s, &[0.0; Q], Attend::new(f32::INFINITY), [OUT, LSE]), Error::Scale(f32::INFINITY), &["inf"]),
        ("softcap NaN", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0).softcap(f32::NAN), [OUT, LSE]), Error::Softcap(f32::NAN), &["NaN"]),
        ("softcap 0", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0).softcap(0.0), [OUT, LSE]), Error::Softcap(0.0), &["softcap 0:"]),
        ("softcap negative", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0).softcap(-50.0), [OUT, LSE]), Error::Softcap(-50.0), &["-50"]),
        ("softcap inf", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0).softcap(f32::INFINITY), [OUT, LSE]), Error::Softcap(f32::INFINITY), &["inf"]),
        ("split 0", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0).split(0), [OUT, LSE]), Error::Split(0), &["0 blocks", "power of two"]),
        ("split 3", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0).split(3), [OUT, LSE]), Error::Split(3), &["3 blocks"]),
        ("split u32::MAX", |c, s| attend(c, s, &[0.0; Q], Attend::new(1.0).split(u32::MAX), [OUT, LSE]), Error::Split(u32::MAX), &["4294967295"]),
        // Layers, heads, experts.
        ("append layer", |c, s| begin(c, s).append(2, &[0.0; 0], &[0.0; 0]), Error::Layer { layer: 2, layers: 2 }, &["layer 2", "layers 0..2"]),
        ("append layer usize::MAX", |c, s| begin(c, s).append(usize::MAX, &[0.0; 0], &[0.0; 0]), Error::Layer { layer: usize::MAX, layers: 2 }, &["18446744073709551615"]),
        ("step attend layer", |c, s| begin(c, s).attend(7, &[0.0; 0], &Attend::new(1.0), AttendOutput::new(&mut [0.0; 0])), Error::Layer { layer: 7, layers: 2 }, &["layer 7"]),
        ("attend layer", |c, s| ask(c, s, 9, LEN, 1), Error::Layer { layer: 9, layers: 2 }, &["layer 9"]),
        ("route layer", |c, s| begin(c, s).route(5, &[0, 1, 1, 0]), Error::Layer { layer: 5, layers: 2 }, &["layer 5"]),
        ("pages layer", |_, s| s.pages(3, 0).map(drop), Error::Layer { layer: 3, layers: 2 }, &["layer 3"]),
        ("resident layer", |_, s| s.resident(4, 0).map(drop), Error::Layer { layer: 4, layers: 2 }, &["layer 4"]),
        ("experts layer", |_, s| s.experts(6, Position(0)).map(drop), Error::Layer { layer: 6, layers: 2 }, &["layer 6"]),
        ("read layer", |_, s| s.read(8, 0, page(Place::Ring, 1), 0, &mut [], &mut []).map(drop), Error::Layer { layer: 8, layers: 2 }, &["layer 8"]),
        ("evict layer", |_, s| s.evict(2, 0, page(Place::Run(0), 0)), Error::Layer { layer: 2, layers: 2 }, &["layer 2"]),
        ("pages KV head", |_, s| s.pages(0, 2).map(drop), Error::KvHead { layer: 0, kv_head: 2, kv_heads: 2 }, &["KV head 2", "KV heads 0..2"]),
        ("resident KV head", |_, s| s.resident(1, 1).map(drop), Error::KvHead { layer: 1, kv_head: 1, kv_heads: 1 }, &["KV head 1", "layer 1"]),
        ("read KV head", |_, s| s.read(0, 5, page(Place::Ring, 1), 0, &mut [0.0; 3], &mut [0.0; 5]).map(drop), Error::KvHead { layer: 0, kv_head: 5, kv_heads: 2 }, &["KV head 5"]),
        ("evict KV head", |_, s| s.evict(0, 3, page(Place::Run(0), 0)), Error::KvHead { layer: 0, kv_head: 3, kv_heads: 2 }, &["KV head 3"]),
        ("expert out of range", |c, s| begin(c, s).route(1, &[0, 1, 2, 3]), Error::Expert { layer: 1, row: 1, expert: 3, experts: 3 }, &["expert 3", "row 1", "layer 1", "experts 0..3"]),
        ("expert u16::MAX", |c, s| begin(c, s).route(0, &[u16::MAX, 1, 2, 1]), Error::Expert { layer: 0, row: 0, expert: u16::MAX, experts: 3 }, &["65535"]),
        ("expert twice", |c, s| begin(c, s).route(0, &[0, 1, 2, 2]), Error::ExpertTwice { layer: 0, row: 1, expert: 2 }, &["expert 2", "twice", "row 1"]),
        // Order of calls.
        ("append twice", |c, s| {
            let mut step = begin(c, s);
            step.append(0, &[0.0; K], &[0.0; V]).unwrap();
            step.append(0, &[0.0; K], &[0.0; V])
        }, Error::Twice { layer: 0, what: "appended" }, &["layer 0", "appended"]),
        ("route twice", |c, s| {
            let mut step = begin(c, s);
            step.route(1, &[0, 1, 1, 2]).unwrap();
            step.route(1, &[0, 1, 1, 2])
        }, Error::Twice { layer: 1, what: "routed" }, &["layer 1", "routed"]),
        ("attend before append", |c, s| begin(c, s).attend(1, &[0.0; 4], &Attend::new(1.0), AttendOutput::new(&mut [0.0; 4])), Error::NotAppended { layer: 1 }, &["layer 1"]),
        ("commit of nothing", |c, s| begin(c, s).commit(), Error::Incomplete { layer: 0, what: "appended" }, &["layer 0", "appended"]),
        ("commit without layer 1", |c, s| {
            let mut step = begin(c, s);
            step.append(0, &[0.0; K], &[0.0; V]).unwrap();
            step.route(0, &[0, 1, 1, 2]).unwrap();
            step.commit()
        }, Error::Incomplete { layer: 1, what: "appended" }, &["layer 1", "appended"]),
        ("commit without a router", |c, s| {
            let mut step = begin(c, s);
            step.append(0, &[0.0; K], &[0.0; V]).unwrap();
            step.append(1, &[0.0; 4], &[0.0; 4]).unwrap();
            step.route(1, &[0, 1, 1, 2]).unwrap();
            step.commit()
        }, Error::Incomplete { layer: 0, what: "routed" }, &["layer 0", "routed"]),
        // Steps.
        ("no sequences", |c, _| c.begin([]).map(drop), Error::NoSequences, &["at least 1"]),
        ("no tokens", |c, s| c.begin([(s, 0)]).map(drop), Error::NoTokens { index: 0 }, &["sequence 0", "0 tokens"]),
        ("no tokens for the second", |c, s| c.begin([(s, 1), (&mut c.sequence(), 0)]).map(drop), Error::NoTokens { index: 1 }, &["sequence 1"]),
        ("foreign sequence", |c, s| {
            let mut other = Cache::new(config()).unwrap().sequence();
            c.begin([(s, 1), (&mut other, 1)]).map(drop)
        }, Error::ForeignSequence { index: 1 }, &["sequence 1", "another cache"]),
        ("foreign sequence attended", |c, _| ask(c, &Cache::new(config()).unwrap().sequence(), 0, 0, 1), Error::ForeignSequence { index: 0 }, &["sequence 0"]),
        ("out of budget", |c, s| c.begin([(s, 320)]).map(drop),
            // The figures are asserted apart, from the usage at that time.
            Error::OutOfBudget { needed: 0, available: 0 }, &["budget"]),
        ("past the last position", |c, s| c.begin([(s, u32::MAX)]).map(drop), Error::PositionOverflow { position: 4294967335 }, &["4294967335", "2147483646"]),
        ("one past the last position", |c, s| c.begin([(s, i32::MAX as u32 - LEN)]).map(drop), Error::PositionOverflow { position: 2147483647 }, &["2147483647"]),
        // Rollback, rows.
        ("rollback too far", |_, s| s.rollback(5), Error::RollbackTooFar { asked: 5, limit: 4 }, &["rollback of 5", "4"]),
        ("rollback u32::MAX", |_, s| s.rollback(u32::MAX), Error::RollbackTooFar { asked: u32::MAX, limit: 4 }, &["4294967295"]),
        ("row past the end", |c, s| ask(c, s, 0, LEN + 1, 1), rows(41, 42), &["41..42", "40"]),
        ("rows past the end", |c, s| ask(c, s, 0, LEN, 2), rows(40, 42), &["40..42"]),
        ("row too old", |c, s| ask(c, s, 1, 34, 1), rows(34, 35), &["34..35", "35..=40"]),
        ("row at the end of u32", |c, s| ask(c, s, 0, u32::MAX, u32::MAX), rows(4294967295, 8589934590), &["4294967295..8589934590"]),
        // Pages.
        ("evict the ring", |_, s| s.evict(0, 0, page(Place::Ring, 1)), Error::Pinned { page: page(Place::Ring, 1) }, &["page 1 of the ring"]),
        ("evict what is not there", |_, s| s.evict(0, 1, page(Place::Run(1), 9)), no_page(1, page(Place::Run(1), 9)), &["page 9 of run 1", "KV head 1"]),
        ("evict of no expert", |_, s| s.evict(0, 0, page(Place::Run(77), 0)), no_page(0, page(Place::Run(77), 0)), &["run 77"]),
        ("evict u32::MAX", |_, s| s.evict(0, 0, page(Place::Sinks, u32::MAX)), no_page(0, page(Place::Sinks, u32::MAX)), &["4294967295", "the sinks"]),
        ("read a lane that is not there", |_, s| read(s, Place::Ring, 1, 8), no_page(1, page(Place::Ring, 1)), &["page 1 of the ring"]),
        ("read lane u32::MAX", |_, s| read(s, Place::Sinks, 0, u32::MAX), no_page(1, page(Place::Sinks, 0)), &["page 0 of the sinks"]),
        ("read a tile that is not there", |_, s| read(s, Place::Ring, 2, 0), no_page(1, page(Place::Ring, 2)), &["page 2 of the ring"]),
        ("read the last tile there could be", |_, s| read(s, Place::Ring, u32::MAX, 0), no_page(1, page(Place::Ring, u32::MAX)), &["4294967295"]),
        ("read of no expert", |_, s| read(s, Place::Run(u16::MAX), 0, 0), no_page(1, page(Place::Run(u16::MAX), 0)), &["run 65535"]),
    ]
}

type ConfigCase = (&'static str, fn(&mut CacheConfig), ConfigError, &'static [&'static str]);

#[rustfmt::skip]
fn configs() -> Vec<ConfigCase> {
    fn rope(c: &mut CacheConfig, theta: f64, rotary_dim: u32) {
        c.layers[1].rope = Some(Rope::new(theta, rotary_dim));
    }
    let roped = |theta, rotary_dim| ConfigError::Rope { layer: 1, theta, rotary_dim, k_dim: 2 };
    let most = i32::MAX as u32 - 1;
    vec![
        ("no layers", |c| c.layers.clear(), ConfigError::NoLayers, &["at least 1 layer"]),
        ("no KV heads", |c| c.layers[1].kv_heads = 0, ConfigError::Heads { layer: 1, kv_heads: 0, query_heads: 1 }, &["layer 1", "0 KV heads"]),
        ("no query heads", |c| c.layers[0].query_heads = 0, ConfigError::Heads { layer: 0, kv_heads: 2, query_heads: 0 }, &["0 query heads"]),
        ("heads that do not divide", |c| c.layers[0].query_heads = 5, ConfigError::Heads { layer: 0, kv_heads: 2, query_heads: 5 }, &["5 query heads", "2 KV heads"]),
        ("k_dim 0", |c| c.layers[0].layout.k_dim = 0, ConfigError::Dim { layer: 0, k_dim: 0, v_dim: 5 }, &["k_dim 0"]),
        ("k_dim 257", |c| c.layers[0].layout.k_dim = 257, ConfigError::Dim { layer: 0, k_dim: 257, v_dim: 5 }, &["257", "256"]),
        ("v_dim 0", |c| c.layers[1].layout.v_dim = 0, ConfigError::Dim { layer: 1, k_dim: 2, v_dim: 0 }, &["v_dim 0"]),
        ("v_dim u32::MAX", |c| c.layers[1].layout.v_dim = u32::MAX, ConfigError::Dim { layer: 1, k_dim: 2, v_dim: u32::MAX }, &["4294967295"]),
        ("window 0", |c| c.layers[1].window = Some(0), ConfigError::Window { layer: 1, window: 0 }, &["window of 0"]),
        ("window past the positions", |c| c.layers[0].window = Some(1 << 31), ConfigError::Window { layer: 0, window: 1 << 31 }, &["2147483648"]),
        ("theta NaN", |c| rope(c, f64::NAN, 2), roped(f64::NAN, 2), &["theta NaN"]),
        ("theta 0", |c| rope(c, 0.0, 2), roped(0.0, 2), &["theta 0 "]),
        ("theta negative", |c| rope(c, -500.0, 2), roped(-500.0, 2), &["-500"]),
        ("theta inf", |c| rope(c, f64::INFINITY, 2), roped(f64::INFINITY, 2), &["inf"]),
        ("rotary_dim 0", |c| rope(c, 1e4, 0), roped(1e4, 0), &["over 0 of 2"]),
        ("rotary_dim odd", |c| rope(c, 1e4, 1), roped(1e4, 1), &["over 1 of 2"]),
        ("rotary_dim past k_dim", |c| rope(c, 1e4, 4), roped(1e4, 4), &["over 4 of 2"]),
        ("ring 0", |c| c.ring = 0, ConfigError::Ring { ring: 0, rollback: 4 }, &["ring of 0"]),
        ("ring past the positions", |c| c.ring = u32::MAX, ConfigError::Ring { ring: u32::MAX, rollback: 4 }, &["4294967295"]),
        ("rollback past the positions", |c| c.rollback = i32::MAX as u32, ConfigError::Ring { ring: 8, rollback: i32::MAX as u32 }, &["2147483647"]),
        ("no experts", |c| c.experts = 0, ConfigError::Experts { experts: 0, top_k: 2 }, &["of 0 experts"]),
        ("too many experts", |c| c.experts = 65536, ConfigError::Experts { experts: 65536, top_k: 2 }, &["65536"]),
        ("top_k 0", |c| c.top_k = 0, ConfigError::Experts { experts: 3, top_k: 0 }, &["0 of 3"]),
        ("top_k past the experts", |c| c.top_k = 4, ConfigError::Experts { experts: 3, top_k: 4 }, &["4 of 3"]),
        ("sinks past the positions", |c| c.sinks = Some(i32::MAX as u32), ConfigError::Sinks { sinks: most + 1 }, &["2147483647"]),
        // Two pages of 128 + 256 + 1024 bytes and one of 128 + 256 + 1024.
        ("budget 0", |c| c.budget = 0, ConfigError::Budget { budget: 0, needed: 4224 }, &["budget of 0", "4224"]),
        ("a byte too few", |c| c.budget = 4223, ConfigError::Budget { budget: 4223, needed: 4224 }, &["4223", "4224"]),
    ]
}

type ShardCase = (&'static str, Result<ShardMap, ShardError>, ShardError, &'static [&'static str]);

#[rustfmt::skip]
fn shards() -> Vec<ShardCase> {
    let skewed = |tokens, experts, multiple, would_do| ShardError::Skewed { tokens, experts, multiple, would_do };
    vec![
        ("no shards", ShardMap::sum(0), ShardError::Zero, &["at least 1"]),
        ("no shards, spread", ShardMap::spread(0), ShardError::Zero, &["at least 1"]),
        ("no shards by XOR", ShardMap::xor(8, 8, 0), ShardError::Zero, &["at least 1"]),
        ("modulus 0", ShardMap::xor(0, 8, 4), ShardError::Zero, &["moduli of at least 1"]),
        ("moduli 6 and 6", ShardMap::xor(6, 6, 2), skewed(6, 6, 8, 8), &["6 and 6", "multiple of 8", "8 would do"]),
        ("moduli 12 and 10", ShardMap::xor(12, 10, 2), skewed(12, 10, 16, 16), &["12 and 10", "16"]),
        ("moduli 100 and 16", ShardMap::xor(100, 16, 4), skewed(100, 16, 16, 112), &["100 and 16", "112 would do"]),
        ("moduli 16 and 100", ShardMap::xor(16, 100, 4), skewed(16, 100, 16, 112), &["16 and 100", "112 would do"]),
        ("G that does not divide", ShardMap::xor(8, 8, 3), ShardError::Uneven { shards: 3, range: 8, would_do: 2 }, &["3 shards", "8 ids", "2 would do"]),
        ("G past the ids", ShardMap::xor(8, 4, 16), ShardError::Uneven { shards: 16, range: 8, would_do: 8 }, &["16 shards", "8 would do"]),
    ]
}

fn assert_text(name: &str, text: &str, needles: &[&str]) {
    assert!(!needles.is_empty());
    for needle in needles {
        assert!(text.contains(needle), "{name}: {text:?} lacks {needle:?}");
    }
}

/// Every row of the tables of bad calls: the variant of the error, its text, and the cache's state afterwards.
#[test]
fn bad_input_is_refused_and_leaves_no_trace() {
    let mut count = 0;
    let rig = || {
        let cache = Cache::new(config()).unwrap();
        let mut sequence = cache.sequence();
        (0..4).for_each(|_| drop(good(&cache, &mut sequence, 10)));
        (cache, sequence)
    };
    let (clean, mut untouched) = rig();
    let before = (clean.usage(), seen(&clean, &untouched), untouched.bytes());
    let outputs = good(&clean, &mut untouched, 3);
    let after = (clean.usage(), seen(&clean, &untouched));
    for (name, run, want, needles) in calls() {
        let (cache, mut sequence) = rig();
        let got = run(&cache, &mut sequence).expect_err(name);
        match (&got, &want) {
            (Error::OutOfBudget { needed, available }, Error::OutOfBudget { .. }) => {
                assert_eq!(*available, BUDGET - cache.usage().taken, "{name}");
                assert!(needed > available, "{name}");
                assert_text(name, &got.to_string(), &[&needed.to_string(), &available.to_string()]);
            }
            // NaN is not itself.
            _ => assert_eq!(format!("{got:?}"), format!("{want:?}"), "{name}"),
        }
        assert_text(name, &got.to_string(), needles);
        assert_eq!(sequence.next_position(), Position(LEN), "{name}");
        assert!((cache.usage(), seen(&cache, &sequence), sequence.bytes()) == before, "{name}");
        assert_eq!(good(&cache, &mut sequence, 3), outputs, "{name}");
        assert!((cache.usage(), seen(&cache, &sequence)) == after, "{name}");
        drop(sequence);
        assert_eq!(cache.usage().taken, 0, "{name}");
        count += 1;
    }
    for (name, spoil, want, needles) in configs() {
        let mut config = config();
        spoil(&mut config);
        let got = config.stores().expect_err(name);
        assert_eq!(format!("{got:?}"), format!("{want:?}"), "{name}");
        let whole = Cache::new(config).expect_err(name);
        assert_eq!(format!("{whole:?}"), format!("{:?}", Error::Config(want)), "{name}");
        assert_eq!(whole.to_string(), got.to_string(), "{name}");
        assert_text(name, &got.to_string(), needles);
        count += 1;
    }
    for (name, got, want, needles) in shards() {
        assert_eq!(got, Err(want), "{name}");
        assert_text(name, &want.to_string(), needles);
        count += 1;
    }
    for asked in ["sse9", "", "AVX2", "avx512 "] {
        let Err(error) = Lanes::by_name(asked) else { panic!("{asked:?} is no lanes") };
        let LanesError::Unavailable { asked: echoed, available } = &error else { panic!("{error:?}") };
        assert_eq!(echoed, asked);
        assert!(available.contains(&"portable"));
        assert_text(asked, &error.to_string(), &[&format!("{asked:?}"), "portable"]);
        count += 1;
    }
    assert!(count >= 120, "{count} cases");
}

/// After a refused call inside a step, the right call may be made in the same step.
#[test]
fn a_step_goes_on_after_a_refusal() {
    let cache = Cache::new(config()).unwrap();
    let (mut a, mut b) = (cache.sequence(), cache.sequence());
    good(&cache, &mut a, 33);
    good(&cache, &mut b, 33);
    let clean = {
        let mut step = begin(&cache, &mut a);
        for (l, [k, v]) in [[K, V], [4, 4]].into_iter().enumerate() {
            step.append(l, &vec![0.5; k], &vec![0.75; v]).unwrap();
            step.route(l, &[2, 0, 1, 2]).unwrap();
        }
        step.commit().unwrap();
        seen(&cache, &a)
    };
    let mut step = begin(&cache, &mut b);
    for (l, [k, v]) in [[K, V], [4, 4]].into_iter().enumerate() {
        for at in [0, v / 2, v - 1] {
            assert!(step.append(l, &vec![9.0; k], &with(v, at, f32::NAN)).is_err());
            assert!(step.append(l, &with(k, at % k, f32::INFINITY), &vec![9.0; v]).is_err());
        }
        assert!(step.route(l, &[2, 0, 1, 3]).is_err());
        assert!(step.route(l, &[2, 0, 1, 1]).is_err());
        step.append(l, &vec![0.5; k], &vec![0.75; v]).unwrap();
        assert!(step.append(l, &vec![9.0; k], &vec![9.0; v]).is_err());
        step.route(l, &[2, 0, 1, 2]).unwrap();
        assert!(step.route(l, &[0, 1, 0, 1]).is_err());
    }
    step.commit().unwrap();
    assert_eq!(seen(&cache, &b), clean);
    for p in 33..35 {
        let tags = |s: &Sequence| s.experts(1, Position(p)).unwrap().map(Iterator::collect::<Vec<_>>);
        assert_eq!(tags(&a), tags(&b));
    }
}

/// Finite q, k and scale whose products overflow upwards, downwards or to NaN, and scores that f32 cannot tell apart. The call returns
/// an error; no output is NaN, or 0 as for a row that sees nothing.
#[test]
fn overflow_of_scores_is_refused() {
    type Product = (&'static str, [f32; 2], [f32; 2], f32, Option<f32>);
    let layer = LayerShape::new(1, 1, 2, Dtype::F32).values(1, Dtype::F32);
    // Keys, queries, scale, cap.
    let cases: [Product; 9] = [
        ("up to inf", [3e38, 3e38], [3e38, 3e38], 1.0, None),
        ("down to -inf", [-3e38, -3e38], [3e38, 3e38], 1.0, None),
        ("inf - inf", [3e38, -3e38], [3e38, 3e38], 1.0, None),
        ("q * scale, times 0", [0.0, 0.0], [3e38, 3e38], 10.0, None),
        ("scale alone", [0.0, 0.0], [0.0, 0.0], f32::MAX, None),
        ("past 2^24", [1e12, 0.0], [1.0, 0.0], 1.0, None),
        ("past -2^31", [-1e12, 0.0], [1.0, 0.0], 1.0, None),
        ("past -2^24", [-5e7, 0.0], [1.0, 0.0], 1.0, None),
        ("scale / softcap", [0.0, 0.0], [1.0, 1.0], 1e38, Some(1e-38)),
    ];
    for lanes in Lanes::available() {
        let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(8).lanes(lanes)).unwrap();
        for (name, k, q, scale, cap) in cases {
            let mut sequence = cache.sequence();
            let mut step = cache.begin([(&mut sequence, 12)]).unwrap();
            step.append(0, &k.repeat(12), &[1.0; 12]).unwrap();
            step.commit().unwrap();
            let mut options = Attend::new(scale);
            options.softcap = cap;
            let (mut out, mut lse) = ([7.0], [7.0]);
            let rows = [Rows::new(&sequence, Position(11), 1)];
            let got = cache.attend(0, &rows, &q, &options, AttendOutput::new(&mut out).lse(&mut lse));
            let right = got.is_ok() && (out[0] - 1.0).abs() < 1e-6 && lse[0].is_finite();
            let refused = matches!(
                got,
                Err(Error::ScoreOverflow { layer: 0, row: 0, head: 0, .. }
                    | Error::Scale(_)
                    | Error::Softcap(_))
            );
            assert!(refused || right, "{name} on {}: {got:?}, out {out:?}, lse {lse:?}", lanes.name());
        }
    }
}

/// A shard map of more shards than a page's handle can name is refused, or every page is on the shard that the map names.
#[test]
fn many_shards_are_refused_or_right() {
    let Ok(map) = ShardMap::sum(70_000) else { return };
    let layer = LayerShape::new(1, 1, 1, Dtype::F32);
    let config = CacheConfig::new(vec![layer], 1 << 30).ring(1).experts(65535, 1).shards(map);
    let Ok(cache) = Cache::new(config) else { return };
    let mut sequence = cache.sequence();
    let mut step = cache.begin([(&mut sequence, 800)]).unwrap();
    step.append(0, &[1.0; 800], &[1.0; 800]).unwrap();
    step.route(0, &[65534; 800]).unwrap();
    step.commit().unwrap();
    for page in sequence.pages(0, 0).unwrap().filter(|page| page.id.place != Place::Ring) {
        assert_eq!(page.shard, map.shard(u64::from(page.id.ordinal / 8), 65534, 0));
    }
    drop(sequence);
    assert!(cache.usage().shards.iter().all(|bytes| *bytes == 0), "shards count pages that are not theirs");
}

/// An abandoned step copied pages shared with a fork and keeps the copies: more memory is in use, and those pages are no longer
/// shared.
#[test]
fn an_abandoned_step_keeps_shared_pages_shared() {
    let cache = Cache::new(config()).unwrap();
    let mut sequence = cache.sequence();
    good(&cache, &mut sequence, 21);
    let fork = sequence.fork();
    let before = (cache.usage(), seen(&cache, &sequence), seen(&cache, &fork));
    for layers in 0..2 {
        let mut step = begin(&cache, &mut sequence);
        for (l, [k, v]) in [[K, V], [4, 4]].into_iter().enumerate().take(layers + 1) {
            step.append(l, &vec![0.0; k], &vec![0.0; v]).unwrap();
        }
        drop(step);
        assert!(
            (cache.usage(), seen(&cache, &sequence), seen(&cache, &fork)) == before,
            "{} layers",
            layers + 1
        );
    }
}
