//! Callers at the limits: drafts rolled back in parts, leaked steps, pages evicted between drafts, forks dropped at odd times, routers
//! that refuse while they learn again, nearly full ranks, frequencies at their limits.

use super::named::{POLICIES, eviction};
use pikv::closed_loop::LoopError;
use pikv::codec::{Code, Codec, Coding};
use pikv::fabric::{InProcess, Options};
use pikv::policy::{Budget, Eviction, H2o, KeyNorm, StreamingLlm};
use pikv::report::{PageId, Place};
use pikv::router::{
    CacheAware, LoadBalanced, PageFeedback, RouteError, Router, RouterKind, RouterState, Routes, Shape,
};
use pikv::shape::Frequencies;
use pikv::shard::ShardMap;
use pikv::tiers::Tiers;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, Error, LayerShape, Position, ReadPages,
    Rope, Rows, Sequence, StepReport,
};
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const LAYERS: usize = 2;
const HEADS: u32 = 2;
const K_DIM: u32 = 4;
const V_DIM: u32 = 3;
const Q_HEADS: u32 = 4;
const LEAKED: usize = 1000;

fn of(branch: u64, position: u32, layer: usize, what: u64, n: u32) -> Vec<f32> {
    let mut rng = Rng(branch << 40 ^ u64::from(position) << 8 ^ (layer as u64) << 4 ^ what);
    noise(rng.next(), n as usize).iter().map(|x| x * 2.0).collect()
}

#[derive(Clone, Copy)]
struct How {
    read: ReadPages,
    closed: bool,
}

const ALL: How = How { read: ReadPages::All, closed: false };

fn push(cache: &Cache, s: &mut Sequence, branch: u64, n: u32, how: How, layers: Option<usize>) -> Vec<u32> {
    push_with(cache, s, branch, n, how, layers, &mut StepReport::default())
}

fn push_with(
    cache: &Cache,
    s: &mut Sequence,
    branch: u64,
    n: u32,
    how: How,
    layers: Option<usize>,
    report: &mut StepReport,
) -> Vec<u32> {
    let first = s.next_position().0;
    let config = cache.config();
    let mut outputs = Vec::new();
    let mut step = cache.begin([(s, n)]).unwrap();
    for layer in 0..layers.map_or(LAYERS, |layers| layers % LEAKED) {
        let rows = |what, dim| (first..first + n).flat_map(|p| of(branch, p, layer, what, dim)).collect();
        let (k, v, q): (Vec<f32>, Vec<f32>, Vec<f32>) =
            (rows(1, HEADS * K_DIM), rows(2, HEADS * V_DIM), rows(3, Q_HEADS * K_DIM));
        step.append(layer, &k, &v).unwrap();
        let expert = |p| {
            let first = Rng(branch ^ u64::from(p) << 3 ^ layer as u64).below(config.experts);
            (0..config.top_k).map(move |i| ((first + i) % config.experts) as u16)
        };
        let experts: Vec<u16> = (first..first + n).flat_map(expert).collect();
        step.route(layer, &experts).unwrap();
        let mut out = vec![0.0; (n * Q_HEADS * V_DIM) as usize];
        let mut lse = vec![0.0; (n * Q_HEADS) as usize];
        let options = Attend::new(0.7).read(how.read).closed_gaps(how.closed);
        step.attend(layer, &q, &options, AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        outputs.extend(bits(&out));
        outputs.extend(bits(&lse));
    }
    match layers {
        Some(layers) if layers >= LEAKED => std::mem::forget(step),
        Some(_) => drop(step),
        None => step.commit_with(report).unwrap(),
    }
    outputs
}

/// The tokens outside the ring, layer by layer and head by head.
fn pages(s: &Sequence) -> Vec<(String, Vec<(u32, u32)>)> {
    let mut all = Vec::new();
    for layer in 0..LAYERS {
        for head in 0..HEADS as usize {
            for page in s.pages(layer, head).unwrap().filter(|page| page.id.place != Place::Ring) {
                let tokens = s.positions(layer, head, page.id).unwrap();
                all.push((format!("{layer}/{head} {}", page.id), tokens.map(|(l, p)| (l, p.0)).collect()));
            }
        }
    }
    all
}

fn held(s: &Sequence, layer: usize, head: usize) -> Vec<u32> {
    let pages = s.pages(layer, head).unwrap().filter(|page| page.id.place != Place::Ring);
    let mut held: Vec<u32> =
        pages.flat_map(|page| s.positions(layer, head, page.id).unwrap().map(|(_, p)| p.0)).collect();
    held.sort_unstable();
    held
}

fn look(cache: &Cache, s: &Sequence) -> Vec<Vec<u32>> {
    let look = |layer| {
        let first = s.next_position();
        let q = of(99, first.0, layer, 3, Q_HEADS * K_DIM);
        let mut out = vec![0.0; (Q_HEADS * V_DIM) as usize];
        let rows = Rows::new(s, Position(first.0), 1);
        cache.attend(layer, &[rows], &q, &Attend::new(0.7), AttendOutput::new(&mut out)).unwrap();
        bits(&out)
    };
    (0..LAYERS).map(look).collect()
}

#[derive(Clone, Debug)]
struct Setup {
    policy: &'static str,
    budget: Budget,
    batch: Option<u32>,
    read: ReadPages,
    closed: bool,
    rope: bool,
    window: Option<u32>,
    code: Option<Code>,
    aged: bool,
    experts: u32,
    ring: u32,
    sinks: u32,
    slack: u32,
    tiers: bool,
}

impl Setup {
    fn draw(rng: &mut Rng, policy: &'static str) -> Setup {
        let experts = rng.of(&[1, 1, 3]);
        let reads = [ReadPages::All, ReadPages::All, ReadPages::Quest { pages: 1 }, ReadPages::Experts];
        let rope = policy == "expected" || rng.one_in(3);
        let heads = |x: u32, y: u32| Budget::Heads([vec![x, y], vec![y, Budget::ALL]].into());
        let budget = match rng.below(5) {
            0 => Budget::Share(0.3),
            1 if policy != "H2O shared" => heads(50, 90),
            2 => Budget::Bytes(6000 + u64::from(rng.below(12000))),
            3 => Budget::Tokens(2),
            _ => Budget::Tokens(70),
        };
        Setup {
            policy,
            budget,
            batch: rng.of(&[None, Some(1), Some(30)]),
            read: rng.of(&reads[..if experts > 1 { 4 } else { 3 }]),
            closed: rope && rng.one_in(2),
            rope,
            window: rng.of(&[None, None, Some(50), Some(120)]),
            code: rng.of(&[None, None, None, Some(Code::Int8)]),
            aged: rng.one_in(2),
            experts,
            ring: rng.of(&[1, 2, 8, 33]),
            sinks: rng.of(&[0, 3]),
            slack: rng.of(&[1, 3, 16, 40, 90]),
            tiers: rng.one_in(2),
        }
    }

    fn rope(&self) -> Option<Rope> {
        self.rope.then_some(Rope::new(10_000.0, 4))
    }

    fn cache(&self) -> Cache {
        let shape = |window| {
            LayerShape::new(HEADS, Q_HEADS, K_DIM, Dtype::F32)
                .values(V_DIM, Dtype::F32)
                .window(window)
                .rope(self.rope())
        };
        let mut config = CacheConfig::new(vec![shape(None), shape(self.window)], 1 << 22)
            .ring(self.ring)
            .sinks(self.sinks)
            .rollback(self.slack)
            .experts(self.experts, self.experts.min(2))
            .nan_fill(true)
            .key_bounds(matches!(self.read, ReadPages::Quest { .. }));
        if let Some(code) = self.code {
            config = config.compress(Codec::new(Coding::new(code), Coding::new(code)));
            if self.aged {
                let older = Coding::new(Code::Int4);
                config = config.age(40, Codec::new(older.clone(), older));
            }
        }
        if self.tiers && !(self.aged && self.code.is_some()) {
            config = config.tiers(Tiers::new().host(1 << 22));
        }
        let mut eviction = eviction(self.policy, self.budget.clone(), self.rope());
        eviction.batch = self.batch;
        Cache::new(config.evict(eviction)).unwrap()
    }
}

/// Runs `turns` turns on a sequence and its twin.
fn history(setup: &Setup, seed: u64, turns: u32) {
    let mut rng = Rng(seed);
    let how = How { read: setup.read, closed: setup.closed };
    let (mine, theirs) = (setup.cache(), setup.cache());
    let (mut a, mut b) = (mine.sequence(), theirs.sequence());
    let mut others: Vec<Sequence> = Vec::new();
    let mut leaked = false;
    let tiers = setup.tiers && !(setup.aged && setup.code.is_some());
    let context = |turn: u32, what: &str| format!("{setup:?}, seed {seed}, turn {turn}: {what}");
    let prompt = 1 + rng.below(250);
    assert_eq!(push(&mine, &mut a, 0, prompt, how, None), push(&theirs, &mut b, 0, prompt, how, None));
    for turn in 1..=turns {
        let mut what = Vec::new();
        for _ in 0..rng.below(4) {
            match rng.below(13) {
                0 => {
                    what.push("dropped step".to_string());
                    let n = 1 + rng.below(70);
                    let layers = rng.below(LAYERS as u32 + 1) as usize;
                    let leak = if rng.one_in(3) { LEAKED } else { 0 };
                    leaked |= leak > 0;
                    push(&mine, &mut a, 7 + u64::from(turn), n, how, Some(leak + layers));
                }
                1 => {
                    what.push("rollback(0)".to_string());
                    a.rollback(0).unwrap();
                    let limit = a.rollback_limit();
                    assert_eq!(a.rollback(limit + 1), Err(Error::RollbackTooFar { asked: limit + 1, limit }));
                }
                2 => {
                    what.push("fork".to_string());
                    let fork = a.fork();
                    others.push(if rng.one_in(2) { std::mem::replace(&mut a, fork) } else { fork });
                    if others.len() > 2 {
                        others.remove(0);
                    }
                }
                3 => {
                    what.push("fork that goes on".to_string());
                    let branch = 1000 + u64::from(turn);
                    for other in &mut others {
                        push(&mine, other, branch, 1 + rng.below(setup.slack), how, None);
                        if rng.one_in(4) {
                            let some: Vec<PageId> = other.pages(0, 0).unwrap().map(|page| page.id).collect();
                            let _ = other.evict(0, 0, rng.of(&some));
                        }
                        if rng.one_in(6) {
                            other.evict_all();
                        }
                        let back = rng.below(other.rollback_limit() + 1);
                        other.rollback(back).unwrap();
                    }
                }
                4 => {
                    what.push("forks dropped".to_string());
                    others.clear();
                }
                5 | 6 if tiers => {
                    what.push("moves".to_string());
                    match rng.below(3) {
                        0 => drop(a.demote(u64::from(rng.below(4000))).unwrap()),
                        1 => drop(a.promote(u64::from(rng.below(4000))).unwrap()),
                        _ => a.arrange(0..LAYERS, &[0.5, 0.5]).unwrap(),
                    }
                }
                _ => {
                    let some = 1 + rng.below(setup.slack);
                    let mut left = rng.of(&[1, setup.slack, some]);
                    what.push(format!("{left} drafts"));
                    let branch = 5000 + u64::from(turn);
                    let mut count = left;
                    while left > 0 {
                        let n = if rng.one_in(3) { 1 + rng.below(left) } else { 1 };
                        push(&mine, &mut a, branch, n, how, None);
                        left -= n;
                        if rng.one_in(12) {
                            others.push(a.fork());
                        }
                        if tiers && rng.one_in(12) {
                            a.demote(u64::from(rng.below(4000))).unwrap();
                        }
                        if tiers && rng.one_in(12) {
                            a.promote(u64::from(rng.below(4000))).unwrap();
                        }
                        if rng.one_in(9) {
                            others.clear();
                        }
                    }
                    while count > 0 && rng.one_in(2) {
                        let some = 1 + rng.below(count);
                        a.rollback(some).unwrap();
                        count -= some;
                    }
                    a.rollback(count).unwrap();
                }
            }
        }
        let what = what.join(", ");
        assert_eq!(a.next_position(), b.next_position());
        for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            assert_eq!(held(&a, layer, head), held(&b, layer, head), "{}", context(turn, &what));
            assert_eq!(a.resident(layer, head), b.resident(layer, head), "{}", context(turn, &what));
        }
        assert_eq!(pages(&a), pages(&b), "{}", context(turn, &what));
        assert_eq!(look(&mine, &a), look(&theirs, &b), "{}", context(turn, &what));
        if others.is_empty() && !leaked {
            assert_eq!(a.bytes(), mine.usage().taken, "bytes, {}", context(turn, &what));
        }
        // Both do the same.
        match rng.below(14) {
            0 => {
                let some: Vec<PageId> = b.pages(0, 1).unwrap().map(|page| page.id).collect();
                let page = rng.of(&some);
                assert_eq!(a.evict(0, 1, page), b.evict(0, 1, page), "{}", context(turn, "evict"));
            }
            1 => {
                let from = rng.below(a.next_position().0);
                a.pin(from..from + 9);
                b.pin(from..from + 9);
            }
            2 if rng.one_in(6) => (a.evict_all(), b.evict_all()).0,
            3 => {
                let back = rng.below(a.rollback_limit().min(setup.slack) + 1).min(b.next_position().0 - 1);
                a.rollback(back).unwrap();
                b.rollback(back).unwrap();
                assert_eq!(pages(&a), pages(&b), "both back {back}, {}", context(turn, &what));
            }
            _ => {}
        }
        let n = if rng.one_in(4) { 1 + rng.below(setup.slack.min(setup.ring)) } else { 1 };
        leaked = false;
        let outputs = push(&mine, &mut a, 0, n, how, None);
        assert_eq!(outputs, push(&theirs, &mut b, 0, n, how, None), "{}", context(turn, &what));
    }
    drop((a, others));
    assert_eq!(mine.usage().taken, 0);
}

#[test]
fn histories_are_those_of_a_twin() {
    for (i, policy) in (0u64..).zip(POLICIES) {
        for round in 0..scaled(2, 60) {
            let seed = round << 8 | i;
            history(&Setup::draw(&mut Rng(seed ^ 0xabe << 20), policy), seed, 60);
        }
    }
}

fn plain(policy: &'static str) -> Setup {
    Setup {
        policy,
        budget: Budget::Tokens(100),
        batch: Some(1),
        read: ReadPages::All,
        closed: false,
        rope: false,
        window: None,
        code: None,
        aged: false,
        experts: 1,
        ring: 8,
        sinks: 0,
        slack: 8,
        tiers: false,
    }
}

/// A fork between two compactions, and a rollback of the sequence to before both.
#[test]
fn fork_between_two_compactions() {
    let mut failed = Vec::new();
    for slack in [40, 64, 90, 128] {
        let setup = Setup { slack, ..plain("key norm") };
        let (cache, other) = (setup.cache(), setup.cache());
        let (mut a, mut b) = (cache.sequence(), other.sequence());
        push(&cache, &mut a, 0, 200, ALL, None);
        push(&other, &mut b, 0, 200, ALL, None);
        for turn in 0..slack + 60 {
            let at = turn * 7 % slack;
            let mut fork = None;
            for i in 0..slack {
                if i == at {
                    fork = Some(a.fork());
                }
                push(&cache, &mut a, 50 + u64::from(turn), 1, ALL, None);
            }
            if let Err(error) = a.rollback(slack) {
                failed.push(format!(
                    "slack {slack}, turn {turn}, fork after {at} drafts: {error:?}, then {:?}",
                    a.rollback(0)
                ));
                break;
            }
            drop(fork);
            assert_eq!(pages(&a), pages(&b), "slack {slack}, turn {turn}");
            assert_eq!(look(&cache, &a), look(&other, &b), "slack {slack}, turn {turn}");
            push(&cache, &mut a, 0, 1, ALL, None);
            push(&other, &mut b, 0, 1, ALL, None);
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// A page that the caller evicts between drafts stays evicted after they are rolled back; all other tokens are held, unchanged.
#[test]
fn evicted_between_drafts() {
    let mut failed = Vec::new();
    for policy in ["key norm", "LRU", "H2O"] {
        for seed in 0..8 {
            let mut rng = Rng(seed);
            let setup = Setup { slack: 60, ring: 4, ..plain(policy) };
            let cache = setup.cache();
            let mut s = cache.sequence();
            push(&cache, &mut s, 0, 200, ALL, None);
            'turns: for turn in 0..60u64 {
                let before = held(&s, 0, 0);
                let mut gone: Vec<u32> = Vec::new();
                let at = rng.below(60);
                for i in 0..60 {
                    push(&cache, &mut s, turn + 50, 1, ALL, None);
                    if i == at {
                        let all: Vec<PageId> = s.pages(0, 0).unwrap().map(|page| page.id).collect();
                        let page = rng.of(&all);
                        if page.place != Place::Ring {
                            gone.extend(s.positions(0, 0, page).unwrap().map(|(_, p)| p.0));
                            s.evict(0, 0, page).unwrap();
                        }
                    }
                }
                s.rollback(60).unwrap();
                // Its tokens that drafts evicted are evicted with it.
                let got = held(&s, 0, 0);
                let more: Vec<&u32> =
                    got.iter().filter(|p| !before.contains(p) || gone.contains(p)).collect();
                if !more.is_empty() || !got.is_sorted_by(|a, b| a < b) {
                    failed.push(format!(
                        "{policy}, seed {seed}, turn {turn}, evicted after {at}: {more:?} of {got:?}"
                    ));
                    break 'turns;
                }
                if s.resident(0, 0).unwrap().0 != got.len() as u32 + 4 {
                    failed.push(format!(
                        "{policy}, seed {seed}, turn {turn}: {:?}, {}",
                        s.resident(0, 0),
                        got.len()
                    ));
                    break 'turns;
                }
                let list: Vec<PageId> = s.pages(0, 0).unwrap().map(|page| page.id).collect();
                for page in list {
                    let tokens: Vec<(u32, Position)> = s.positions(0, 0, page).unwrap().collect();
                    for (lane, position) in tokens {
                        let (mut k, mut v) = ([0.0; K_DIM as usize], [0.0; V_DIM as usize]);
                        s.read(0, 0, page, lane, &mut k, &mut v).unwrap();
                        let text = of(0, position.0, 0, 1, HEADS * K_DIM);
                        if bits(&k) != bits(&text[..K_DIM as usize]) {
                            failed.push(format!(
                                "{policy}, seed {seed}, turn {turn}: key of {position:?} in {page}"
                            ));
                            break 'turns;
                        }
                    }
                }
                push(&cache, &mut s, 0, 1 + rng.below(9), ALL, None);
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// The report of a step after drafts were rolled back, compared with a twin's.
#[test]
fn reports() {
    let setup = plain("H2O");
    let (cache, other) = (setup.cache(), setup.cache());
    let (mut a, mut b) = (cache.sequence(), other.sequence());
    let (mut x, mut y) = (StepReport::default(), StepReport::default());
    for turn in 0..200u64 {
        if turn > 0 {
            for _ in 0..5 {
                push_with(&cache, &mut a, turn + 50, 1, ALL, None, &mut x);
            }
            a.rollback(5).unwrap();
        }
        push_with(&cache, &mut a, 0, 1, ALL, None, &mut x);
        push_with(&other, &mut b, 0, 1, ALL, None, &mut y);
        // A rollback does not restore a page's last use: such a page is not reported.
        assert!(x.reused.iter().all(|page| page.gap > 0), "turn {turn}: {:?}", x.reused);
        (x.reused, y.reused) = (Vec::new(), Vec::new());
        assert_eq!(x, y, "turn {turn}");
    }
}

/// A leaked step filed tokens; they are not read through the sequence.
#[test]
fn read_after_a_leak() {
    let setup = plain("LRU");
    let cache = setup.cache();
    let mut s = cache.sequence();
    push(&cache, &mut s, 0, 20, ALL, None);
    let read = |s: &Sequence, lane| {
        let page = PageId { place: Place::Run(0), ordinal: 0 };
        s.read(0, 0, page, lane, &mut [0.0; K_DIM as usize], &mut [0.0; V_DIM as usize])
    };
    let before: Vec<bool> = (0..32).map(|lane| read(&s, lane).is_ok()).collect();
    push(&cache, &mut s, 9, 60, ALL, Some(LEAKED + 2));
    let after: Vec<bool> = (0..32).map(|lane| read(&s, lane).is_ok()).collect();
    assert_eq!(before, after);
}

/// Pins are removed, and a draft is rolled back: as if the draft had never been.
#[test]
fn unpinned_then_rolled_back() {
    let setup = Setup { batch: Some(20), ..plain("key norm") };
    let (cache, other) = (setup.cache(), setup.cache());
    let (mut a, mut b) = (cache.sequence(), other.sequence());
    a.pin(0..150);
    b.pin(0..150);
    push(&cache, &mut a, 0, 200, ALL, None);
    push(&other, &mut b, 0, 200, ALL, None);
    a.unpin();
    b.unpin();
    a.rollback(0).unwrap();
    assert_eq!(pages(&a), pages(&b));
    assert_eq!(look(&cache, &a), look(&other, &b));
}

#[test]
fn nothing_grows() {
    for (policy, window) in [("key norm", None), ("H2O", Some(50)), ("StreamingLLM", None)] {
        let setup = Setup { slack: 4, experts: 2, window, ..plain(policy) };
        let cache = setup.cache();
        let mut s = cache.sequence();
        let (mut most, mut late) = ((0, 0), (0, 0));
        let tokens = scaled(1_000u64, 20_000);
        for i in 0..tokens {
            for _ in 0..i % 3 {
                push(&cache, &mut s, i + 50, 1, ALL, None);
            }
            s.rollback((i % 3) as u32).unwrap();
            push(&cache, &mut s, 0, 1, ALL, None);
            let to = if i < tokens / 5 { &mut most } else { &mut late };
            (to.0, to.1) = (to.0.max(s.table_bytes()), to.1.max(s.bytes()));
            if i % 64 == 0 {
                assert_eq!(s.bytes(), cache.usage().taken);
            }
        }
        assert!(late.0 <= most.0 * 3 / 2 && late.1 <= most.1 * 3 / 2, "{policy}: {most:?}, {late:?}");
    }
}

// Routers.

const EXPERTS: u32 = 4;

fn looped(make: &dyn Fn() -> Box<dyn Router>) -> (Cache, ClosedLoop) {
    let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    let config = CacheConfig::new(vec![layer; 2], 8 << 20).ring(8).rollback(8).experts(EXPERTS, 2);
    let cache = Cache::new(config.evict(Eviction::new(H2o, Budget::Tokens(40)).batch(4))).unwrap();
    (cache.clone(), ClosedLoop::new(cache, vec![make(), make()]).unwrap())
}

fn balanced() -> Box<dyn Router> {
    Box::new(LoadBalanced::default().router(Shape::new(EXPERTS, 2)).unwrap())
}

fn aware() -> Box<dyn Router> {
    Box::new(CacheAware::default().router(Shape::new(EXPERTS, 2)).unwrap())
}

/// One step; row `i` of a sequence has the numbers of `(seed, i)`.
fn turn(pikv: &mut ClosedLoop, parts: Vec<(&mut Sequence, u32, u64)>) {
    let of_parts: Vec<(u32, u64)> = parts.iter().map(|(_, n, seed)| (*n, *seed)).collect();
    let mut step = pikv.begin(parts.into_iter().map(|(s, n, _)| (s, n))).unwrap();
    for layer in 0..2 {
        let rows = |what| -> Vec<f32> {
            let each = of_parts.iter().flat_map(|&(n, seed)| (0..n).map(move |i| (seed, i)));
            each.flat_map(|(seed, i)| of(seed, i, layer, what, 4)).collect()
        };
        let (k, v, q, logits) = (rows(1), rows(2), rows(3), rows(4));
        let mut out = vec![0.0; q.len()];
        step.route(layer, &logits).unwrap();
        step.append(layer, &k, &v).unwrap();
        step.attend(layer, &q, &Attend::new(1.0), AttendOutput::new(&mut out)).unwrap();
    }
    step.commit().unwrap();
}

fn states(pikv: &mut ClosedLoop) -> Vec<RouterState> {
    pikv.routers().iter().map(|router| router.state()).collect()
}

/// Two forks both roll back the last two rows of a step that they share.
#[test]
fn both_forks_take_back_a_part() {
    let ((cache, mut pikv), (other, mut twin)) = (looped(&balanced), looped(&balanced));
    let (mut a, mut x) = (cache.sequence(), other.sequence());
    turn(&mut pikv, vec![(&mut a, 5, 1)]);
    turn(&mut twin, vec![(&mut x, 5, 1)]);
    turn(&mut pikv, vec![(&mut a, 4, 2)]);
    turn(&mut twin, vec![(&mut x, 2, 2)]);
    let mut fork = a.fork();
    a.rollback(2).unwrap();
    fork.rollback(2).unwrap();
    // No sequence has the last two tokens.
    assert_eq!(states(&mut pikv), states(&mut twin));
}

/// A sequence rolls its drafts back while a fork has them. When the fork is dropped they stay learnt, as those of every dropped
/// sequence do.
#[test]
fn what_a_fork_had_when_it_ended_stays_learnt() {
    let (cache, mut pikv) = looped(&balanced);
    let mut a = cache.sequence();
    turn(&mut pikv, vec![(&mut a, 5, 1)]);
    turn(&mut pikv, vec![(&mut a, 3, 2)]);
    let (learnt, fork) = (states(&mut pikv), a.fork());
    a.rollback(3).unwrap();
    drop(fork);
    assert_eq!(states(&mut pikv), learnt);
}

/// Two sequences, each with drafts through two loops over one cache, and dropped steps between.
#[test]
fn routers_of_several_sequences() {
    for seed in 0..scaled(12, 200) {
        let mut rng = Rng(seed);
        let make = if seed % 2 == 0 { balanced } else { aware };
        let ((cache, mut pikv), (other, mut twin)) = (looped(&make), looped(&make));
        let mut second = ClosedLoop::new(cache.clone(), vec![make(), make()]).unwrap();
        let mut second_twin = ClosedLoop::new(other.clone(), vec![make(), make()]).unwrap();
        let (mut all, mut twins) =
            ([cache.sequence(), cache.sequence()], [other.sequence(), other.sequence()]);
        for i in 0..60u64 {
            let at = rng.below(2) as usize;
            let drafts = rng.below(9);
            let (mut left, mut through) = (drafts, 0);
            while left > 0 {
                let n = 1 + rng.below(left);
                let to = if rng.one_in(2) { &mut pikv } else { &mut second };
                if rng.one_in(5) {
                    // Dropped.
                    drop(to.begin([(&mut all[at], 3)]).unwrap());
                }
                turn(to, vec![(&mut all[at], n, seed << 20 | i << 8 | through)]);
                (left, through) = (left - n, through + 1);
            }
            while left < drafts {
                let n = 1 + rng.below(drafts - left);
                all[at].rollback(n).unwrap();
                left += n;
                if rng.one_in(3) {
                    let _ = (states(&mut pikv), states(&mut second));
                }
            }
            assert_eq!(states(&mut pikv), states(&mut twin), "seed {seed}, turn {i}");
            assert_eq!(states(&mut second), states(&mut second_twin), "seed {seed}, turn {i}");
            let n = 1 + rng.below(3);
            let text = seed << 20 | i << 8 | 200;
            let first = rng.one_in(2);
            let (to, theirs) = if first { (&mut pikv, &mut twin) } else { (&mut second, &mut second_twin) };
            turn(to, vec![(&mut all[at], n, text)]);
            turn(theirs, vec![(&mut twins[at], n, text)]);
        }
    }
}

/// A router of the user that panics or refuses once asked for, at its `at`-th call.
#[derive(Debug)]
struct Hostile {
    of: Box<dyn Router>,
    left: Arc<AtomicU32>,
    what: &'static str,
    panics: bool,
}

impl Hostile {
    fn due(&self, what: &str) -> bool {
        let due = self.what == what && self.left.load(Ordering::Relaxed) > 0 && {
            self.left.fetch_sub(1, Ordering::Relaxed) == 1
        };
        assert!(!(due && self.panics), "as asked");
        due
    }
}

impl Router for Hostile {
    fn kind(&self) -> RouterKind {
        self.of.kind()
    }
    fn shape(&self) -> Shape {
        self.of.shape()
    }
    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError> {
        if self.due("route") {
            return Err(RouteError::Position { position: 7 });
        }
        self.of.route(first, logits, out)
    }
    fn observe(&mut self, feedback: &PageFeedback<'_>) -> Result<(), RouteError> {
        if self.due("observe") {
            return Err(RouteError::Position { position: 7 });
        }
        self.of.observe(feedback)
    }
    fn discard(&mut self) {
        self.due("discard");
        self.of.discard();
    }
    fn state(&self) -> RouterState {
        self.due("state");
        self.of.state()
    }
    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError> {
        if self.due("restore") {
            return Err(RouteError::Position { position: 7 });
        }
        self.of.restore(state)
    }
}

/// The second layer's router fails while it learns again after a rollback. The first layer's router has the state of a loop without the
/// failure, at once and after later steps, and the sequence can be used.
#[test]
fn hostile_routers() {
    let mut failed = Vec::new();
    for what in ["route", "observe", "state", "restore", "discard"] {
        for panics in [true, false] {
            for at in 1..6 {
                let left = Arc::new(AtomicU32::new(0));
                let (cache, _) = looped(&balanced);
                let hostile = Hostile { of: balanced(), left: left.clone(), what, panics };
                let mut pikv = ClosedLoop::new(cache.clone(), vec![balanced(), Box::new(hostile)]).unwrap();
                let (other, mut twin) = looped(&balanced);
                let (mut a, mut x) = (cache.sequence(), other.sequence());
                turn(&mut pikv, vec![(&mut a, 5, 1)]);
                turn(&mut twin, vec![(&mut x, 5, 1)]);
                turn(&mut pikv, vec![(&mut a, 4, 2)]);
                turn(&mut twin, vec![(&mut x, 2, 2)]);
                turn(&mut pikv, vec![(&mut a, 1, 3)]);
                a.rollback(3).unwrap();
                left.store(at, Ordering::Relaxed);
                let begun = catch_unwind(AssertUnwindSafe(|| pikv.begin([(&mut a, 1)]).map(drop)));
                left.store(0, Ordering::Relaxed);
                let (mine, theirs) = (states(&mut pikv), states(&mut twin));
                if mine[0] != theirs[0] {
                    failed.push(format!("{what}, panics {panics}, call {at}: layer 0"));
                }
                // A router that fails to restore its state is named, and learns nothing twice.
                let refused = matches!(begun, Ok(Err(LoopError::Route { layer: 1, .. })));
                if refused != (what == "restore" && !panics && at == 1) {
                    failed.push(format!("{what}, panics {panics}, call {at}: {begun:?}"));
                }
                for i in 10..30 {
                    turn(&mut pikv, vec![(&mut a, 1, i)]);
                    turn(&mut twin, vec![(&mut x, 1, i)]);
                }
                if states(&mut pikv)[0] != states(&mut twin)[0] {
                    failed.push(format!("{what}, panics {panics}, call {at}: layer 0 later"));
                }
                if pikv.kept_steps() > 12 {
                    failed.push(format!("{what}, panics {panics}, call {at}: {} steps", pikv.kept_steps()));
                }
                drop(a);
                assert_eq!(cache.usage().taken, 0);
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn idle_for_long() {
    let (cache, mut pikv) = looped(&balanced);
    let (mut idle, mut a) = (cache.sequence(), cache.sequence());
    turn(&mut pikv, vec![(&mut idle, 3, 0)]);
    for i in 1..10_000 {
        turn(&mut pikv, vec![(&mut a, 2, i)]);
        a.rollback(1).unwrap();
        assert!(pikv.kept_steps() <= 64 + 4 * 8, "{}", pikv.kept_steps());
    }
    idle.rollback(3).unwrap();
    turn(&mut pikv, vec![(&mut idle, 3, 0)]);
    idle.clear();
    turn(&mut pikv, vec![(&mut idle, 3, 0)]);
    drop((idle, a));
    assert_eq!(cache.usage().taken, 0);
}

/// Asks for all positions of a table of one pair: 16 GiB. With a limit on the address space (`ulimit -v`) only.
#[test]
fn frequencies_of_too_many_channels() {
    let refused = pikv::shape::Frequencies::plain(10_000.0, u32::MAX);
    assert!(refused.is_err());
}

// Ranks.

fn ranked(policy: Option<&'static str>, slack: u32, budget: u64) -> (Cache, Cache) {
    let layer = LayerShape::new(1, 1, 32, Dtype::F32);
    let mut config = CacheConfig::new(vec![layer], 16 << 20).ring(8).rollback(slack).experts(2, 1);
    if let Some(policy) = policy {
        config = config.evict(eviction(policy, Budget::Tokens(400), None));
    }
    let far = config.clone().shards(ShardMap::sum(4).unwrap());
    let ranks = InProcess::new(&far, 4, budget).unwrap();
    (Cache::over(far, Box::new(ranks), Options::default()).unwrap(), Cache::new(config).unwrap())
}

fn extend(cache: &Cache, s: &mut Sequence, n: usize, seed: u64, drop_it: bool) -> Result<(), Error> {
    let mut rng = Rng(seed);
    let mut out = vec![0.0; n * 32];
    let mut step = cache.begin([(s, n as u32)])?;
    step.append(0, &noise(seed, n * 32), &noise(seed + 1, n * 32))?;
    step.attend(0, &noise(seed + 2, n * 32), &Attend::new(0.2), AttendOutput::new(&mut out))?;
    step.route(0, &(0..n).map(|_| rng.below(2) as u16).collect::<Vec<_>>())?;
    if drop_it { Ok(()) } else { step.commit() }
}

fn read_far(cache: &Cache, s: &Sequence) -> Result<Vec<u32>, Error> {
    let mut out = [0.0; 32];
    let rows = [Rows::new(s, Position(s.next_position().0 - 1), 1)];
    cache.attend(0, &rows, &noise(7, 32), &Attend::new(0.2), AttendOutput::new(&mut out))?;
    Ok(bits(&out))
}

fn far_bytes(cache: &Cache) -> u64 {
    cache.ranks().unwrap().iter().map(|rank| rank.bytes).sum()
}

/// Over ranks with room for everything, results have the bits of one process, with drafts, forks, dropped steps and policies. Without
/// a policy no read takes memory of a rank.
#[test]
fn ranks() {
    let mut failed = Vec::new();
    for policy in [None, Some("key norm"), Some("LRU"), Some("H2O")] {
        for round in 0..scaled(4, 60) {
            let mut rng = Rng(round * 5 + 1);
            let slack = rng.of(&[8, 70]);
            let (far, one) = ranked(policy, slack, 64 << 20);
            let (mut all, mut twins) = (vec![far.sequence()], vec![one.sequence()]);
            let (mut took, mut after) = (0, Vec::new());
            'turns: for i in 0..150u64 {
                let at = rng.below(all.len() as u32) as usize;
                let (seed, n) = (round << 20 | i << 4, rng.of(&[1, 1, 3, 8]));
                let mut what = "step";
                if rng.one_in(5) {
                    extend(&far, &mut all[at], 9, seed + 77, true).unwrap();
                }
                extend(&far, &mut all[at], n, seed, false).unwrap();
                extend(&one, &mut twins[at], n, seed, false).unwrap();
                if rng.one_in(4) {
                    let drafts = (1 + rng.below(slack)) as usize;
                    for d in 0..drafts {
                        extend(&far, &mut all[at], 1, seed + 1000 + d as u64, false).unwrap();
                    }
                    if let Err(error) = all[at].rollback(drafts as u32) {
                        failed.push(format!("{policy:?}, round {round}, turn {i}: {error:?}"));
                        break 'turns;
                    }
                    what = "drafts";
                }
                if rng.one_in(6) && all.len() < 3 {
                    let (fork, twin) = (all[at].fork(), twins[at].fork());
                    all.push(fork);
                    twins.push(twin);
                    what = "fork";
                }
                if rng.one_in(15) && all.len() > 1 {
                    all.remove(at);
                    twins.remove(at);
                }
                for (s, twin) in all.iter().zip(&twins).filter(|(s, _)| s.next_position().0 > 0) {
                    let before = far_bytes(&far);
                    let (x, y) = (read_far(&far, s), read_far(&one, twin).unwrap());
                    if x.as_ref() != Ok(&y) {
                        failed.push(format!("{policy:?}, round {round}, turn {i}, {what}: {x:?}"));
                        break 'turns;
                    }
                    if far_bytes(&far) > before {
                        took += 1;
                        after.push((i, what));
                    }
                }
            }
            if took > 0 && policy.is_none() {
                failed.push(format!("round {round}: reads took memory: {after:?}"));
            }
            drop(all);
            assert_eq!(far_bytes(&far), 0, "{policy:?}, round {round}");
            assert_eq!(far.usage().taken, 0, "{policy:?}, round {round}");
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Ranks that rotate keys by other frequencies are refused.
#[test]
fn ranks_of_other_frequencies() {
    let rope = Some(Rope::new(10_000.0, 4));
    let layer = LayerShape::new(1, 1, 4, Dtype::F32).rope(rope);
    let config = |inverse: &[f64], factor| {
        let frequencies = Frequencies::new(inverse, factor).unwrap();
        let config = CacheConfig::new(vec![layer; 2], 1 << 20).shards(ShardMap::sum(2).unwrap());
        config.frequencies(0..1, frequencies)
    };
    let own = config(&[1.0, 0.01], 1.0);
    for other in [
        config(&[1.0, 0.0], 1.0),
        config(&[1.0, 0.01], 1.0 + f64::EPSILON),
        config(&[1.0, 0.01f64.next_up()], 1.0),
    ] {
        let ranks = InProcess::new(&other, 2, 1 << 20).unwrap();
        let over = Cache::over(own.clone(), Box::new(ranks), Options::default());
        assert!(over.is_err(), "{other:?}");
    }
}

/// Quest takes the factor of scaled frequencies into account: of two pages, one with a large rotated channel and one with a large channel
/// that is not rotated, it reads the one with the higher score under each factor.
#[test]
fn quest_with_a_factor() {
    let rope = Some(Rope::new(10_000.0, 4));
    let layer = LayerShape::new(1, 1, 8, Dtype::F32).values(1, Dtype::F32).rope(rope);
    for factor in [1.0 / 1024.0, 0.25, 1.0, 1.5, 32.0] {
        let frequencies = Frequencies::new(&[0.0, 0.0], factor).unwrap();
        let config =
            CacheConfig::new(vec![layer], 1 << 20).ring(1).key_bounds(true).frequencies(0..1, frequencies);
        let cache = Cache::new(config).unwrap();
        let mut s = cache.sequence();
        // Page 0 wins by its turned channels, page 1 by the others, where the factor says so.
        let n = 97;
        let keys: Vec<f32> = (0..n)
            .flat_map(|p| match p / 32 {
                0 => [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
                1 => [0.0, 0.0, 0.0, 0.0, 0.9, 0.0, 0.0, 0.0],
                _ => [0.0; 8],
            })
            .collect();
        let mut step = cache.begin([(&mut s, n)]).unwrap();
        step.append(0, &keys, &(0..n).map(|p| (p / 32) as f32).collect::<Vec<_>>()).unwrap();
        step.commit().unwrap();
        let mut masses = Vec::new();
        let mut out = [0.0];
        let q = [4.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0];
        let rows = [Rows::new(&s, Position(n - 1), 1)];
        cache
            .attend(
                0,
                &rows,
                &q,
                &Attend::new(1.0).read(ReadPages::Quest { pages: 1 }),
                AttendOutput::new(&mut out).mass(&mut masses),
            )
            .unwrap();
        let read: Vec<u32> = masses
            .iter()
            .filter(|m| m.page.place != Place::Ring && m.tokens.iter().any(|x| *x > 0.0))
            .map(|m| m.page.ordinal)
            .collect();
        let want = u32::from(factor * factor < 0.9);
        assert_eq!(read, [want], "factor {factor}, out {out:?}");
    }
}

// Pages that are put together at known lengths.

/// Norm of the key at `position`: the policy evicts 128 tokens each at 521, 649 and 777 tokens, from pages 0..9, 9..16 and later ones.
/// With a rollback of 150 the evictions are final, and pages compacted, at 671 and 799.
fn norm(position: u32) -> f32 {
    match position {
        0..288 if position % 9 < 4 => 300.0,
        288..512 if position % 7 < 4 => 200.0,
        512..768 if position.is_multiple_of(2) => 100.0,
        _ => 1.0,
    }
}

fn normed() -> Cache {
    let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    let config = CacheConfig::new(vec![layer], 1 << 20).ring(8).rollback(150).sinks(0).nan_fill(true);
    Cache::new(config.evict(Eviction::new(KeyNorm, Budget::Tokens(520)).batch(128))).unwrap()
}

fn grow(cache: &Cache, s: &mut Sequence, n: u32) {
    for _ in 0..n {
        let p = s.next_position().0;
        let mut step = cache.begin([(&mut *s, 1)]).unwrap();
        step.append(0, &[norm(p), 0.0, 0.0, 0.0], &[p as f32; 4]).unwrap();
        step.commit().unwrap();
    }
}

fn listed(s: &Sequence) -> Vec<(u32, Vec<u32>)> {
    let pages = s.pages(0, 0).unwrap().filter(|page| page.id.place != Place::Ring);
    pages
        .map(|page| (page.id.ordinal, s.positions(0, 0, page.id).unwrap().map(|(_, p)| p.0).collect()))
        .collect()
}

#[test]
fn back_before_two_times_pages_were_put_together() {
    let cache = normed();
    let mut s = cache.sequence();
    grow(&cache, &mut s, 670);
    let before = listed(&s);
    grow(&cache, &mut s, 20);
    let fork = s.fork();
    grow(&cache, &mut s, 130);
    let back = s.rollback(150);
    assert_eq!(back, Ok(()), "then: {:?}", s.rollback(0));
    assert_eq!(listed(&s), before);
    drop(fork);
}

#[test]
fn a_page_that_tokens_moved_to_is_evicted() {
    for ordinal in 4..9 {
        let cache = normed();
        let mut s = cache.sequence();
        grow(&cache, &mut s, 670);
        let before: Vec<u32> = listed(&s).into_iter().flat_map(|(_, p)| p).collect();
        grow(&cache, &mut s, 20);
        let page = PageId { place: Place::Run(0), ordinal };
        let gone: Vec<u32> = s.positions(0, 0, page).unwrap().map(|(_, p)| p.0).collect();
        s.evict(0, 0, page).unwrap();
        s.rollback(20).unwrap();
        let got: Vec<u32> = listed(&s).into_iter().flat_map(|(_, p)| p).collect();
        let want: Vec<u32> = before.into_iter().filter(|p| !gone.contains(p)).collect();
        let lost: Vec<&u32> = want.iter().filter(|p| !got.contains(p)).collect();
        println!(
            "page {ordinal} with {gone:?} evicted: lost {lost:?}; resident {:?}, listed {}",
            s.resident(0, 0),
            got.len()
        );
        assert_eq!(got, want, "page {ordinal} evicted");
    }
}

/// Without memory for the pages that a rollback needs nothing changes, and the rollback succeeds later.
#[test]
fn no_memory_for_a_rollback() {
    let cache = normed();
    let mut s = cache.sequence();
    grow(&cache, &mut s, 670);
    let before = listed(&s);
    grow(&cache, &mut s, 20);
    let fork = s.fork();
    let now = (listed(&s), s.bytes(), s.resident(0, 0));
    let mut others: Vec<Sequence> = (0..60).map(|_| cache.sequence()).collect();
    let mut steps = Vec::new();
    let mut n = 4096;
    for other in &mut others {
        match cache.begin([(other, n.max(1))]) {
            Ok(step) => steps.push(step),
            Err(_) => n /= 2,
        }
    }
    let taken = cache.usage().taken;
    let refused = s.rollback(20);
    assert!(matches!(refused, Err(Error::OutOfBudget { .. })), "{refused:?}");
    assert_eq!((listed(&s), s.bytes(), s.resident(0, 0)), now);
    assert_eq!(cache.usage().taken, taken);
    drop(steps);
    s.rollback(20).unwrap();
    assert_eq!(listed(&s), before);
    assert_eq!(listed(&fork), now.0);
    drop((s, fork, others));
    assert_eq!(cache.usage().taken, 0);
}

/// A step of a loop that is leaked after it was routed.
#[test]
fn a_leaked_step_of_a_loop() {
    let ((cache, mut pikv), (other, mut twin)) = (looped(&balanced), looped(&balanced));
    let (mut a, mut x) = (cache.sequence(), other.sequence());
    turn(&mut pikv, vec![(&mut a, 5, 1)]);
    turn(&mut twin, vec![(&mut x, 5, 1)]);
    let mut step = pikv.begin([(&mut a, 2)]).unwrap();
    step.route(0, &[0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]).unwrap();
    std::mem::forget(step);
    turn(&mut pikv, vec![(&mut a, 1, 2)]);
    turn(&mut twin, vec![(&mut x, 1, 2)]);
    assert_eq!(states(&mut pikv), states(&mut twin));
}

/// Layers that share a rotation and differ in frequencies, with and without gaps, have the results of caches of their own.
#[test]
fn frequencies_of_layers() {
    let rope = Some(Rope::new(10_000.0, 4));
    let layer = LayerShape::new(1, 1, 8, Dtype::F32).values(2, Dtype::F32).rope(rope);
    let kinds = [
        None,
        Some(Frequencies::new(&[0.0, 0.0], 1024.0).unwrap()),
        Some(Frequencies::new(&[std::f64::consts::TAU, 0.0], 1.0 / 1024.0).unwrap()),
        Some(Frequencies::new(&[0.3, 0.002], 1.3).unwrap()),
        Some(Frequencies::new(&[0.3, 0.002], 1.3).unwrap()),
        None,
    ];
    for closed in [false, true] {
        let cache = |kinds: &[Option<Frequencies>]| {
            let mut config = CacheConfig::new(vec![layer; kinds.len()], 1 << 20).ring(8).rollback(4);
            for (l, kind) in kinds.iter().enumerate() {
                if let Some(kind) = kind {
                    config = config.frequencies(l..l + 1, kind.clone());
                }
            }
            Cache::new(config.evict(Eviction::new(StreamingLlm, Budget::Tokens(60)).batch(3))).unwrap()
        };
        let run = |cache: &Cache, layers: std::ops::Range<usize>, drafts: bool| {
            let mut s = cache.sequence();
            let mut all = vec![Vec::new(); layers.len()];
            for p in 0..200 {
                for draft in (0..if drafts { 3 } else { 0 }).rev().chain([9]) {
                    let seed = if draft == 9 { 1 } else { 70 };
                    let mut step = cache.begin([(&mut s, 1)]).unwrap();
                    for (l, layer) in layers.clone().enumerate() {
                        let mut out = [0.0; 2];
                        step.append(l, &of(seed, p, layer, 1, 8), &of(seed, p, layer, 2, 2)).unwrap();
                        let options = Attend::new(0.001).closed_gaps(closed);
                        step.attend(l, &of(seed, p, layer, 3, 8), &options, AttendOutput::new(&mut out))
                            .unwrap();
                        if draft == 9 {
                            all[l].extend(bits(&out));
                        }
                    }
                    step.commit().unwrap();
                    if draft == 0 {
                        s.rollback(3).unwrap();
                    }
                }
            }
            all
        };
        let together = run(&cache(&kinds), 0..6, true);
        for (l, together) in together.into_iter().enumerate() {
            assert_eq!(
                run(&cache(&kinds[l..l + 1]), l..l + 1, false)[0],
                together,
                "layer {l}, closed {closed}"
            );
        }
    }
}

/// A caller frees all pages between drafts, while a window slides.
#[test]
fn all_is_evicted_between_drafts() {
    for seed in 0..scaled(30, 200) {
        let mut rng = Rng(seed);
        let policy = rng.of(&POLICIES[..13]);
        let setup = Setup {
            window: rng.of(&[None, Some(50)]),
            experts: rng.of(&[1, 3]),
            slack: rng.of(&[8, 60]),
            sinks: 3,
            code: rng.of(&[None, Some(Code::Int8)]),
            ring: rng.of(&[1, 8]),
            ..plain(policy)
        };
        let cache = setup.cache();
        let mut s = cache.sequence();
        push(&cache, &mut s, 0, 150, ALL, None);
        for turn in 0..20u64 {
            let (drafts, at) = (1 + rng.below(setup.slack), rng.below(setup.slack));
            let mut all_gone = false;
            for i in 0..drafts {
                push(&cache, &mut s, turn + 50, 1, ALL, None);
                if i == at {
                    s.evict_all();
                    all_gone = true;
                }
            }
            s.rollback(drafts).unwrap();
            for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let n = held(&s, layer, head).len() as u32;
                let context = format!("{setup:?}, seed {seed}, turn {turn}, evicted {all_gone}");
                assert_eq!(s.resident(layer, head).unwrap().0, n + setup.ring, "{context}");
                assert!(!all_gone || n == 0, "{context}: {n} held");
            }
            assert_eq!(s.bytes(), cache.usage().taken, "{setup:?}, seed {seed}, turn {turn}");
            push(&cache, &mut s, 0, 1 + rng.below(30).min(setup.ring), ALL, None);
        }
        drop(s);
        assert_eq!(cache.usage().taken, 0);
    }
}

/// Over ranks: pages that are compacted while drafts exist, and restored.
#[test]
fn ranks_and_pages_put_together() {
    let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    let config = CacheConfig::new(vec![layer], 1 << 20).ring(8).rollback(150).sinks(0);
    let config = config.evict(Eviction::new(KeyNorm, Budget::Tokens(520)).batch(128));
    let far = config.clone().shards(ShardMap::sum(4).unwrap());
    let ranks = InProcess::new(&far, 4, 1 << 20).unwrap();
    let far = Cache::over(far, Box::new(ranks), Options::default()).unwrap();
    let one = Cache::new(config).unwrap();
    let read = |cache: &Cache, s: &Sequence| {
        let mut out = [0.0; 4];
        let rows = [Rows::new(s, Position(s.next_position().0 - 1), 1)];
        cache
            .attend(0, &rows, &[0.001, 0.0, 0.0, 0.0], &Attend::new(0.2), AttendOutput::new(&mut out))
            .unwrap();
        bits(&out)
    };
    let (mut s, mut t) = (far.sequence(), one.sequence());
    let mut took = Vec::new();
    let mut forks = Vec::new();
    for (turn, (n, back, forked)) in [
        (300, 0, false),
        (370, 0, false),
        (20, 20, false),
        (20, 0, true),
        (5, 20, false),
        (20, 20, true),
        (110, 0, false),
        (30, 30, false),
        (40, 40, true),
        (40, 0, false),
        (100, 140, false),
        (400, 100, false),
    ]
    .into_iter()
    .enumerate()
    {
        grow(&far, &mut s, n);
        grow(&one, &mut t, n);
        for what in ["grown", "back"] {
            let before = far_bytes(&far);
            assert_eq!(read(&far, &s), read(&one, &t), "turn {turn}, {what}");
            if far_bytes(&far) > before {
                took.push(format!(
                    "turn {turn} at {:?}, {what}: {} bytes",
                    s.next_position(),
                    far_bytes(&far) - before
                ));
            }
            if what == "grown" {
                if forked {
                    forks.push((s.fork(), t.fork()));
                }
                s.rollback(back).unwrap();
                t.rollback(back).unwrap();
            }
        }
        for (f, g) in &forks {
            let before = far_bytes(&far);
            assert_eq!(read(&far, f), read(&one, g), "fork, turn {turn}");
            if far_bytes(&far) > before {
                took.push(format!("fork, turn {turn}: {} bytes", far_bytes(&far) - before));
            }
        }
    }
    drop((s, forks));
    assert_eq!(far_bytes(&far), 0);
    assert!(took.is_empty(), "{took:#?}");
}
