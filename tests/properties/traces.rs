//! Tokens that were rolled back, dropped or refused leave no trace: a sequence with rejected drafts, dropped steps, refused steps and
//! forks is compared with a twin that never had any of them. Outputs are equal bit for bit, and the same tokens are held in the same
//! pages.

use super::named::{POLICIES, eviction};
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::Budget;
use pikv::report::{PageId, PageMass, Place};
use pikv::rules::Hits;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Position, ReadPages, Rows, Sequence,
    StepReport,
};
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;

const LAYERS: usize = 2;
const K_DIM: u32 = 4;
const V_DIM: u32 = 3;
const QUERY_HEADS: u32 = 2;

/// A layer of one KV head that `QUERY_HEADS` query heads read.
fn shape(window: Option<u32>) -> LayerShape {
    LayerShape::new(1, QUERY_HEADS, K_DIM, Dtype::F32).values(V_DIM, Dtype::F32).window(window)
}

/// Numbers of a token: `what` selects key, value, query or expert; `branch` the text.
fn of(branch: u64, position: u32, layer: usize, what: u64, n: u32) -> Vec<f32> {
    let mut rng = Rng(branch << 40 ^ u64::from(position) << 8 ^ (layer as u64) << 4 ^ what);
    noise(rng.next(), n as usize).iter().map(|x| x * 2.0).collect()
}

/// Added to the layers of a step that is leaked instead of dropped.
const LEAKED: usize = 1000;

/// Appends `n` tokens of a text and attends them in every layer; the bits of all outputs, or nothing if the step was dropped after
/// `layers` layers.
fn push(
    cache: &Cache,
    sequence: &mut Sequence,
    branch: u64,
    n: u32,
    read: ReadPages,
    layers: Option<usize>,
) -> Vec<u32> {
    push_with(cache, sequence, branch, n, read, layers, &mut StepReport::default())
}

/// [`push`], with the hits of the step.
fn push_with(
    cache: &Cache,
    sequence: &mut Sequence,
    branch: u64,
    n: u32,
    read: ReadPages,
    layers: Option<usize>,
    report: &mut StepReport,
) -> Vec<u32> {
    let first = sequence.next_position().0;
    let config = cache.config();
    let mut outputs = Vec::new();
    let mut step = cache.begin([(sequence, n)]).unwrap();
    for layer in 0..layers.map_or(LAYERS, |layers| layers % LEAKED) {
        let rows = |what, dim| (first..first + n).flat_map(|p| of(branch, p, layer, what, dim)).collect();
        let (k, v, q): (Vec<f32>, Vec<f32>, Vec<f32>) =
            (rows(1, K_DIM), rows(2, V_DIM), rows(3, QUERY_HEADS * K_DIM));
        step.append(layer, &k, &v).unwrap();
        let expert = |p| {
            let first = Rng(branch ^ u64::from(p) << 3 ^ layer as u64).below(config.experts);
            (0..config.top_k).map(move |i| ((first + i) % config.experts) as u16)
        };
        let experts: Vec<u16> = (first..first + n).flat_map(expert).collect();
        step.route(layer, &experts).unwrap();
        let mut out = vec![0.0; (n * QUERY_HEADS * V_DIM) as usize];
        let mut lse = vec![0.0; (n * QUERY_HEADS) as usize];
        let options = Attend::new(0.7).read(read);
        step.attend(layer, &q, &options, AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        outputs.extend(bits(&out));
        outputs.extend(bits(&lse));
    }
    match layers {
        Some(layers) if layers > LAYERS => std::mem::forget(step),
        Some(_) => drop(step),
        None => step.commit_with(report).unwrap(),
    }
    outputs
}

/// The reads of a row at the next position, outside a step: outputs, and pages with their masses.
fn look(cache: &Cache, sequence: &Sequence, read: ReadPages) -> Vec<(Vec<u32>, Vec<String>)> {
    // The row's experts are unknown.
    let read = if read == ReadPages::Experts { ReadPages::All } else { read };
    let look = |layer| {
        let first = sequence.next_position();
        let q = of(99, first.0, layer, 3, QUERY_HEADS * K_DIM);
        let (mut out, mut mass) = (vec![0.0; (QUERY_HEADS * V_DIM) as usize], Vec::new());
        let rows = Rows::new(sequence, Position(first.0), 1);
        let options = Attend::new(0.7).read(read);
        cache.attend(layer, &[rows], &q, &options, AttendOutput::new(&mut out).mass(&mut mass)).unwrap();
        // A page that left the window for good has nothing, and may be listed or not where no policy counts it.
        let seen =
            |page: &&PageMass| page.page.place != Place::Ring && page.tokens.iter().any(|mass| *mass != 0.0);
        let mass = mass.iter().filter(seen);
        (bits(&out), mass.map(|page| format!("{} {:?}", page.page, bits(&page.tokens))).collect())
    };
    (0..LAYERS).map(look).collect()
}

/// The tokens that lie in pages outside the ring, layer by layer: each page's name, and lane and position of its tokens.
fn pages(sequence: &Sequence) -> Vec<(String, Vec<(u32, u32)>)> {
    let mut all = Vec::new();
    for layer in 0..LAYERS {
        for page in sequence.pages(layer, 0).unwrap().filter(|page| page.id.place != Place::Ring) {
            let tokens = sequence.positions(layer, 0, page.id).unwrap();
            all.push((format!("{layer} {}", page.id), tokens.map(|(lane, p)| (lane, p.0)).collect()));
        }
    }
    all
}

/// The positions held outside the ring in a layer.
fn held(sequence: &Sequence, layer: usize) -> Vec<u32> {
    let pages = sequence.pages(layer, 0).unwrap().filter(|page| page.id.place != Place::Ring);
    let mut held: Vec<u32> =
        pages.flat_map(|page| sequence.positions(layer, 0, page.id).unwrap().map(|(_, p)| p.0)).collect();
    held.sort_unstable();
    held
}

/// A random cache and its form of reading.
#[derive(Clone, Debug)]
struct Setup {
    policy: &'static str,
    tokens: u32,
    batch: Option<u32>,
    read: ReadPages,
    window: Option<u32>,
    code: Option<Code>,
    aged: bool,
    experts: u32,
    ring: u32,
    sinks: u32,
    slack: u32,
}

impl Setup {
    fn draw(rng: &mut Rng, policy: &'static str) -> Setup {
        let experts = rng.of(&[1, 1, 3]);
        let reads = [
            ReadPages::All,
            ReadPages::All,
            ReadPages::Quest { pages: 1 },
            ReadPages::Quest { pages: 2 },
            ReadPages::Experts,
        ];
        Setup {
            policy,
            tokens: rng.of(&[40, 70, 110, 150]),
            batch: rng.of(&[None, Some(1), Some(30)]),
            read: rng.of(&reads[..if experts > 1 { 5 } else { 4 }]),
            window: rng.of(&[None, None, Some(50), Some(120)]),
            code: rng.of(&[None, None, None, Some(Code::Int8), Some(Code::Int4)]),
            aged: rng.one_in(2),
            experts,
            ring: rng.of(&[4, 8, 20]),
            sinks: rng.of(&[0, 3]),
            slack: rng.of(&[1, 3, 8, 16]),
        }
    }

    fn cache(&self) -> Cache {
        let mut config = CacheConfig::new(vec![shape(None), shape(self.window)], 1 << 22)
            .ring(self.ring)
            .sinks(self.sinks)
            .rollback(self.slack)
            .experts(self.experts, self.experts.min(2))
            .nan_fill(true)
            .hits(Hits::new().pages(2).every(1).known(5))
            .key_bounds(matches!(self.read, ReadPages::Quest { .. }));
        if let Some(code) = self.code {
            config = config.compress(Codec::new(Coding::new(code), Coding::new(code)));
            if self.aged && code == Code::Int8 {
                let older = Coding::new(Code::Int4);
                config = config.age(40, Codec::new(older.clone(), older));
            }
        }
        if self.policy != "none" {
            let mut eviction = eviction(self.policy, Budget::Tokens(self.tokens), None);
            eviction.batch = self.batch;
            config = config.evict(eviction);
        }
        Cache::new(config).unwrap()
    }
}

/// Runs `turns` turns on a sequence and its twin; pages that rows wanted.
fn history(setup: &Setup, seed: u64, turns: u32) -> f64 {
    let (mut rng, mut wanted) = (Rng(seed), 0.0);
    let (mine, theirs) = (setup.cache(), setup.cache());
    let (mut a, mut b) = (mine.sequence(), theirs.sequence());
    // Sequences that share pages with it.
    let mut others: Vec<Sequence> = Vec::new();
    let context = |turn: u32, what: &str| format!("{setup:?}, seed {seed}, turn {turn}: {what}");
    let prompt = 1 + rng.below(90);
    let outputs = push(&mine, &mut a, 0, prompt, setup.read, None);
    assert_eq!(outputs, push(&theirs, &mut b, 0, prompt, setup.read, None), "{}", context(0, "prompt"));
    for turn in 1..=turns {
        let mut what = Vec::new();
        for _ in 0..rng.below(3) {
            match rng.below(10) {
                0 => {
                    what.push("dropped step");
                    let (n, layers) = (1 + rng.below(40), rng.below(LAYERS as u32 + 1) as usize);
                    let leaked = if rng.one_in(3) { LEAKED } else { 0 };
                    push(&mine, &mut a, 7 + u64::from(turn), n, setup.read, Some(leaked + layers));
                }
                1 => {
                    what.push("refused step");
                    let refused = mine.begin([(&mut a, 100_000_000)]).map(drop);
                    assert!(matches!(refused, Err(Error::OutOfBudget { .. })), "{refused:?}");
                }
                2 => {
                    what.push("fork");
                    let fork = a.fork();
                    // One of the two continues.
                    others.push(if rng.one_in(2) { std::mem::replace(&mut a, fork) } else { fork });
                    if others.len() > 2 {
                        others.remove(0);
                    }
                }
                3 => {
                    what.push("fork that goes on");
                    let branch = 1000 + u64::from(turn);
                    for other in &mut others {
                        push(&mine, other, branch, 1 + rng.below(setup.slack), setup.read, None);
                        let back = rng.below(other.rollback_limit().min(setup.slack) + 1);
                        other.rollback(back).unwrap();
                    }
                }
                _ => {
                    what.push("drafts");
                    let mut left = (1 + rng.below(setup.slack)).min(setup.slack);
                    let branch = 5000 + u64::from(turn);
                    let mut count = 0;
                    while left > 0 {
                        let n = if rng.one_in(3) { 1 + rng.below(left) } else { 1 };
                        push(&mine, &mut a, branch, n, setup.read, None);
                        (left, count) = (left - n, count + n);
                    }
                    // Once in a while bit by bit.
                    if count > 1 && rng.one_in(3) {
                        a.rollback(1).unwrap();
                        count -= 1;
                    }
                    a.rollback(count).unwrap();
                }
            }
        }
        let what = what.join(", ");
        assert_eq!(a.next_position(), b.next_position());
        if setup.policy != "none" {
            for layer in 0..LAYERS {
                assert_eq!(held(&a, layer), held(&b, layer), "{}", context(turn, &what));
                assert_eq!(a.resident(layer, 0), b.resident(layer, 0), "{}", context(turn, &what));
            }
            assert_eq!(pages(&a), pages(&b), "{}", context(turn, &what));
        }
        assert_eq!(look(&mine, &a, setup.read), look(&theirs, &b, setup.read), "{}", context(turn, &what));
        let n =
            if rng.one_in(4) { 1 + rng.below(2 * setup.slack.min(setup.ring)).min(setup.ring) } else { 1 };
        // Part of a draft is rolled back: as if the step had ended there.
        let more = if n <= setup.slack && rng.one_in(3) { rng.below(setup.slack - n + 1) } else { 0 };
        let rows = |outputs: &[u32], n: u32, of: u32| -> Vec<u32> {
            let layers = outputs.chunks_exact(outputs.len() / LAYERS);
            let (out, lse) = ((QUERY_HEADS * V_DIM) as usize, QUERY_HEADS as usize);
            let some = |layer: &[u32]| {
                let (a, b) = layer.split_at(of as usize * out);
                [&a[..n as usize * out], &b[..n as usize * lse]].concat()
            };
            layers.flat_map(some).collect()
        };
        let [mut met, mut twins] = [StepReport::default(), StepReport::default()];
        let outputs = push_with(&mine, &mut a, 0, n + more, setup.read, None, &mut met);
        a.rollback(more).unwrap();
        let twin = push_with(&theirs, &mut b, 0, n, setup.read, None, &mut twins);
        for layer in (0..LAYERS).filter(|_| more == 0) {
            let of = |report: &StepReport| [report.hits(layer).to_vec(), report.misses(layer).to_vec()];
            assert_eq!(of(&met), of(&twins), "{}", context(turn, &what));
            wanted += of(&met).iter().flatten().sum::<f64>();
        }
        // In a step that is longer than the ring rows are read in another order.
        if n + more <= setup.ring {
            assert_eq!(rows(&outputs, n, n + more), twin, "{}", context(turn, &what));
        }
    }
    drop((a, others));
    assert_eq!((mine.usage().taken, mine.usage().ghosts), (0, 0));
    wanted
}

#[test]
fn what_never_was_leaves_no_trace() {
    let (rounds, mut wanted) = (scaled(2, 80), 0.0);
    for (i, policy) in (0u64..).zip(["none"].into_iter().chain(POLICIES)) {
        for round in 0..rounds {
            let seed = round << 8 | i;
            let setup = Setup::draw(&mut Rng(seed ^ 0x5eed << 20), policy);
            wanted += history(&setup, seed, 220);
        }
    }
    assert!(wanted > 0.0);
}

/// Seven drafts of a token each, all rolled back, at every second position.
#[test]
fn rejected_drafts_do_not_change_who_is_held() {
    for policy in ["LRU", "LRU+", "TOVA", "SnapKV", "ChunkKV", "H2O", "key norm"] {
        for read in [ReadPages::All, ReadPages::Quest { pages: 2 }] {
            let setup = Setup {
                policy,
                tokens: 150,
                batch: None,
                read,
                window: None,
                code: None,
                aged: false,
                experts: 1,
                ring: 8,
                sinks: 0,
                slack: 8,
            };
            let (mine, theirs) = (setup.cache(), setup.cache());
            let (mut a, mut b) = (mine.sequence(), theirs.sequence());
            for i in 0..450 {
                if i % 2 == 0 {
                    (0..7).for_each(|_| drop(push(&mine, &mut a, 1000 + i, 1, read, None)));
                    a.rollback(7).unwrap();
                }
                assert_eq!(held(&a, 0), held(&b, 0), "{policy}, {read:?} at {i}");
                let (x, y) = (push(&mine, &mut a, 0, 1, read, None), push(&theirs, &mut b, 0, 1, read, None));
                assert_eq!(x, y, "{policy}, {read:?} at {i}");
            }
        }
    }
}

fn plain(policy: &'static str) -> Setup {
    Setup {
        policy,
        tokens: 100,
        batch: Some(1),
        read: ReadPages::All,
        window: None,
        code: None,
        aged: false,
        experts: 1,
        ring: 8,
        sinks: 0,
        slack: 8,
    }
}

#[test]
fn a_dropped_step_changes_nothing() {
    let setup = plain("key norm");
    let cache = setup.cache();
    let mut sequence = cache.sequence();
    for p in 0..400 {
        push(&cache, &mut sequence, 0, 1, ReadPages::All, None);
        let (before, usage) = ((pages(&sequence), look(&cache, &sequence, ReadPages::All)), cache.usage());
        push(&cache, &mut sequence, 9, 1, ReadPages::All, Some(LAYERS));
        assert_eq!((pages(&sequence), look(&cache, &sequence, ReadPages::All)), before, "at {p}");
        assert_eq!(cache.usage(), usage, "at {p}");
    }
}

#[test]
fn a_refused_step_changes_nothing() {
    let setup = plain("key norm");
    let cache = setup.cache();
    let mut sequence = cache.sequence();
    for p in 0..400 {
        push(&cache, &mut sequence, 0, 1, ReadPages::All, None);
        let (before, usage) = ((pages(&sequence), look(&cache, &sequence, ReadPages::All)), cache.usage());
        let refused = cache.begin([(&mut sequence, 10_000_000)]).map(drop);
        assert!(matches!(refused, Err(Error::OutOfBudget { .. })));
        assert_eq!((pages(&sequence), look(&cache, &sequence, ReadPages::All)), before, "at {p}");
        assert_eq!(cache.usage(), usage, "at {p}");
    }
}

/// The pages that rows read by their bounds, however tokens are cut into steps, behind windows of any width.
#[test]
fn quest_reads_the_same_however_tokens_are_cut() {
    for seed in 0..scaled(8, 320) {
        let mut rng = Rng(seed);
        let setup = Setup {
            window: Some(30 + rng.below(150)),
            read: ReadPages::Quest { pages: 1 + rng.below(3) },
            ring: 20,
            slack: 16 * rng.below(2),
            experts: 1 + 2 * rng.below(2),
            ..plain("none")
        };
        let (one, cut) = (setup.cache(), setup.cache());
        let (mut a, mut b) = (one.sequence(), cut.sequence());
        while a.next_position().0 < 400 {
            let n = 1 + rng.below(setup.ring);
            let whole = push(&cut, &mut b, 0, n, setup.read, None);
            let rows: Vec<Vec<u32>> = (0..n).map(|_| push(&one, &mut a, 0, 1, setup.read, None)).collect();
            let (out, lse) = ((QUERY_HEADS * V_DIM) as usize, QUERY_HEADS as usize);
            for (layer, whole) in whole.chunks_exact(whole.len() / LAYERS).enumerate() {
                let (outs, lses) = whole.split_at(n as usize * out);
                for (i, row) in rows.iter().enumerate() {
                    let row = &row[layer * (out + lse)..][..out + lse];
                    let same = [&outs[i * out..][..out], &lses[i * lse..][..lse]].concat();
                    assert_eq!(row, same, "{setup:?}, seed {seed}, layer {layer}, row {i} of {n}");
                }
            }
        }
    }
}

/// A page that the caller evicts between drafts stays evicted when the drafts are rolled back, wherever its tokens were before the drafts
/// caused a compaction.
#[test]
fn what_a_caller_evicts_stays_evicted() {
    for policy in ["LRU", "LRU+", "TOVA", "key norm", "H2O", "H2O shared"] {
        for seed in 0..scaled(4, 100) {
            let mut rng = Rng(seed);
            let setup = Setup { ring: 4, slack: 16, experts: rng.of(&[1, 2]), ..plain(policy) };
            let cache = setup.cache();
            let mut sequence = cache.sequence();
            let mut evicted: Vec<u32> = Vec::new();
            for turn in 0..60 {
                (0..1 + rng.below(6))
                    .for_each(|_| drop(push(&cache, &mut sequence, 0, 1, ReadPages::All, None)));
                let drafts = 1 + rng.below(16);
                let at = rng.below(drafts);
                for i in 0..drafts {
                    push(&cache, &mut sequence, turn + 50, 1, ReadPages::All, None);
                    if i == at {
                        let pages: Vec<PageId> = sequence.pages(0, 0).unwrap().map(|page| page.id).collect();
                        let page = rng.of(&pages);
                        let tokens = sequence.positions(0, 0, page).unwrap().map(|(_, p)| p.0);
                        let tokens: Vec<u32> = tokens.collect();
                        if page.place != Place::Ring {
                            sequence.evict(0, 0, page).unwrap();
                            evicted.extend(tokens);
                        }
                    }
                }
                sequence.rollback(drafts).unwrap();
                let len = sequence.next_position().0;
                // Tokens that are in the ring again are filed again.
                evicted.retain(|p| *p + 4 < len);
                let held = held(&sequence, 0);
                assert!(held.iter().all(|p| !evicted.contains(p)), "{policy}, seed {seed}, turn {turn}");
                assert!(held.is_sorted_by(|a, b| a < b), "{policy}, seed {seed}, turn {turn}: {held:?}");
                assert_eq!(sequence.resident(0, 0).unwrap().0, held.len() as u32 + len.min(4), "{policy}");
            }
            drop(sequence);
            assert_eq!(cache.usage().taken, 0);
        }
    }
}

/// The memory reserved by a leaked step is freed when its sequence is used again or dropped, and its tokens are not visible.
#[test]
fn a_leaked_step_is_as_dropped() {
    let setup = Setup { experts: 2, ..plain("LRU") };
    let cache = setup.cache();
    let mut sequence = cache.sequence();
    push(&cache, &mut sequence, 0, 150, ReadPages::All, None);
    let usage = cache.usage();
    let seen = |sequence: &Sequence| {
        let held = (pages(sequence), sequence.resident(0, 0).unwrap(), sequence.resident(1, 0).unwrap());
        let fork = sequence.fork();
        (held, pages(&fork), look(&cache, sequence, ReadPages::All), look(&cache, &fork, ReadPages::All))
    };
    let before = seen(&sequence);
    for layers in [0, 1, 2, 2, 2] {
        push(&cache, &mut sequence, 9, 60, ReadPages::All, Some(LEAKED + layers));
        assert_eq!(seen(&sequence), before, "{layers} layers");
        assert!(cache.usage().taken > usage.taken);
    }
    sequence.rollback(0).unwrap();
    assert_eq!(cache.usage(), usage);
    assert_eq!(seen(&sequence), before);
    push(&cache, &mut sequence, 9, 60, ReadPages::All, Some(LEAKED + 1));
    drop(sequence);
    assert_eq!(cache.usage().taken, 0);
}
