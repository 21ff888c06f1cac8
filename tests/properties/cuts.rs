//! Sequences that are cut at an earlier length, rolled back to checkpoints, or sealed, in random histories. Each has a twin that gets the
//! same later operations, and both must stay equal bit for bit. The twin of
//!
//! * a cut has only ever had those tokens;
//! * a fork was saved and restored, so it shares nothing;
//! * a checkpoint is a fork made at that time;
//! * a sealed sequence was not sealed.

use pikv::fabric::{InProcess, Options};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::report::{PageInfo, Place};
use pikv::shard::ShardMap;
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Sequence, Step};
use pikv_test::numbers::bits;
use pikv_test::twins::{self, Change, Given, Model, Pair, Values, at};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

#[derive(Clone, Debug)]
struct Setup {
    model: Model,
    /// Pages of every layer and head in the first tier, and in the lower one; `None` for unlimited.
    budget: Option<(u64, u64)>,
}

impl Setup {
    fn caches(&self) -> [Cache; 2] {
        let Setup { model, budget } = self;
        let page = model.page();
        let config = |pages: u64| {
            let mut config = model.config(page * pages).backend(pikv_test::backend::backend());
            if model.policy.is_none() {
                config.hits = None;
            }
            config
        };
        let (pages, host) = budget.unwrap_or((1 << 20, 0));
        // Pages that lost tokens are put together where there is room.
        let pages = if model.policy.is_some() { 1 << 20 } else { pages };
        let tiers = Tiers::new().host(host * page).staging(1 << 30);
        [config(pages).tiers(tiers), config(1 << 20)].map(|config| Cache::new(config).unwrap())
    }

    /// Whether a cut at any length works, as long as nothing is evicted by hand.
    fn cuts(&self) -> bool {
        let Model { codec, policy, .. } = self.model;
        codec.is_none() && policy.is_none()
    }
}

fn setup() -> impl Strategy<Value = Setup> {
    let budget = prop_oneof![1 => Just(None), 1 => (20u64..80, 0u64..40).prop_map(Some)];
    let plain = prop_oneof![2 => Just(true), 1 => Just(false)];
    (twins::model(1..=3), budget, plain, any::<bool>(), any::<bool>()).prop_map(
        |(mut model, budget, plain, level, whole)| {
            if plain {
                (model.codec, model.policy) = (None, None);
            }
            if level {
                (model.experts, model.sinks, model.shards) = (1, 0, 1);
            }
            if whole {
                model.window = None;
            }
            Setup { model, budget }
        },
    )
}

#[derive(Clone, Debug)]
enum Op {
    Step { parts: Vec<(u8, u32)>, read: u8, abort: Option<usize> },
    Cut { sequence: u8, at: f64, chunk: u32 },
    Checkpoint { sequence: u8 },
    DropCheckpoints { sequence: u8, from: u32 },
    Seal { sequence: u8 },
    Demote { sequence: u8 },
    DemoteAll,
    Pin { sequence: u8, from: u32 },
    Change(Change),
}

fn op() -> impl Strategy<Value = Op> {
    let sequence = || 0u8..4;
    let part = || (0u8..4, prop_oneof![3 => Just(1u32), 2 => 1u32..=12, 4 => 10u32..=90]);
    let parts = || proptest::collection::vec(part(), 1..=2);
    prop_oneof![
        14 => (parts(), any::<u8>()).prop_map(|(parts, read)| Op::Step { parts, read, abort: None }),
        2 => (parts(), any::<u8>(), 0usize..=3)
            .prop_map(|(parts, read, at)| Op::Step { parts, read, abort: Some(at) }),
        6 => (sequence(), 0.0..=1.05f64, 1u32..=40).prop_map(|(sequence, at, chunk)| Op::Cut { sequence, at, chunk }),
        3 => sequence().prop_map(|sequence| Op::Checkpoint { sequence }),
        1 => (sequence(), 0u32..200).prop_map(|(sequence, from)| Op::DropCheckpoints { sequence, from }),
        4 => sequence().prop_map(|sequence| Op::Seal { sequence }),
        2 => sequence().prop_map(|sequence| Op::Demote { sequence }),
        2 => Just(Op::DemoteAll),
        1 => (sequence(), 0u32..200).prop_map(|(sequence, from)| Op::Pin { sequence, from }),
        7 => twins::change().prop_map(Op::Change),
    ]
}

/// One token in all layers.
#[derive(Clone)]
struct Token(Vec<(Vec<f32>, Vec<f32>, Vec<u16>)>);

/// The history of a pair, kept beside it.
#[derive(Clone, Default)]
struct Log {
    tokens: Vec<Token>,
    /// Forks of the second sequence, by length.
    kept: Vec<(u32, std::rc::Rc<Sequence>)>,
    /// Whether pages were evicted by hand.
    evicted: bool,
}

/// Counts of events, so that a test of nothing does not pass.
#[derive(Debug, Default)]
struct Seen {
    cuts: u32,
    forks: u32,
    checkpoints: u32,
    refused: u32,
    sealed: u32,
    shared: u32,
    away: u32,
    together: u32,
}

struct Twins<'a> {
    setup: &'a Setup,
    caches: [Cache; 2],
    pairs: Vec<Pair>,
    logs: Vec<Log>,
    values: Values,
    seen: Seen,
}

impl Twins<'_> {
    fn step(&mut self, parts: &[(u8, u32)], read: u8, abort: Option<usize>) {
        let Twins { setup: Setup { model, .. }, caches, pairs, logs, values, .. } = self;
        let chosen = twins::chosen(pairs, parts);
        let [left, right] = twins::parts(pairs, &chosen);
        // A step that the tight cache refuses is skipped in both.
        let mut first = match caches[0].begin(left) {
            Err(Error::OutOfBudget { .. } | Error::TierFull { .. }) => return,
            step => step.unwrap(),
        };
        let mut second = caches[1].begin(right).unwrap();
        let rows = first.rows();
        let given = values.step(model, rows);
        let (outs, lses) = model.outs(rows);
        let options = model.how(read);
        for (layer, Given { k, v, q, routes }) in given.iter().enumerate() {
            if abort == Some(layer) {
                return;
            }
            let results = [&mut first, &mut second].map(|step: &mut Step<'_>| {
                let (mut out, mut lse) = (vec![0.0; outs], vec![0.0; lses]);
                step.append(layer, k, v).unwrap();
                if model.experts > 1 {
                    step.route(layer, routes).unwrap();
                }
                step.attend(layer, q, &options, AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
                (bits(&out), bits(&lse))
            });
            assert!(results[0] == results[1], "layer {layer}");
        }
        if abort.is_some() {
            return;
        }
        first.commit().unwrap();
        second.commit().unwrap();
        let mut row = 0;
        for (i, n) in chosen {
            for _ in 0..n {
                let of = |x: &[f32]| x[row * (x.len() / rows)..][..x.len() / rows].to_vec();
                let top_k = given[0].routes.len() / rows;
                let layer = |g: &Given| (of(&g.k), of(&g.v), g.routes[row * top_k..][..top_k].to_vec());
                logs[i].tokens.push(Token(given.iter().map(layer).collect()));
                row += 1;
            }
        }
    }

    /// A sequence that is given the first tokens of a log, `chunk` at a time.
    fn fresh(&self, log: &Log, len: u32, chunk: u32) -> Sequence {
        let mut sequence = self.caches[1].sequence();
        for tokens in log.tokens[..len as usize].chunks(chunk as usize) {
            let mut step = self.caches[1].begin([(&mut sequence, tokens.len() as u32)]).unwrap();
            for layer in 0..self.setup.model.layers {
                let of = tokens.iter().map(|Token(layers)| &layers[layer]);
                let (mut k, mut v, mut routes) = (Vec::<f32>::new(), Vec::<f32>::new(), Vec::new());
                for (key, value, route) in of {
                    k.extend(key);
                    v.extend(value);
                    routes.extend(route);
                }
                step.append(layer, &k, &v).unwrap();
                if self.setup.model.experts > 1 {
                    step.route(layer, &routes).unwrap();
                }
            }
            step.commit().unwrap();
        }
        sequence
    }

    fn cut(&mut self, i: usize, share: f64, chunk: u32) {
        let (log, pair) = (self.logs[i].clone(), &self.pairs[i]);
        let len = pair[0].next_position().0;
        let wanted = (f64::from(len) * share) as u32;
        let oldest = len - pair[0].rollback_limit();
        let fork = match pair[0].fork_at(wanted) {
            Ok(fork) => fork,
            Err(Error::OutOfBudget { .. }) if self.setup.budget.is_some() => return,
            Err(Error::Cut { asked, checkpoints, oldest: from, len: of, .. }) => {
                let known: Vec<u32> = log.kept.iter().map(|(at, _)| *at).collect();
                assert_eq!((asked, checkpoints, of), (wanted, known, len));
                let whole = self.setup.model.window.is_none() && self.setup.cuts() && !log.evicted;
                assert!(from == 0 && wanted > len || from == oldest && !whole, "{from} of {oldest}");
                assert!(wanted > len || (!whole && wanted < oldest && log.kept.iter().all(|k| k.0 > wanted)));
                self.seen.refused += 1;
                return;
            }
            Err(other) => panic!("{other}"),
        };
        let got = fork.next_position().0;
        assert!(wanted <= len && got <= wanted);
        let kept: Vec<_> = log.kept.iter().filter(|(at, _)| *at <= got).cloned().collect();
        let near = || {
            let mut near = pair[1].fork();
            near.rollback(len - wanted).unwrap();
            near
        };
        let far = got == wanted && wanted < oldest && kept.last().is_none_or(|(at, _)| *at != got);
        let oracle = if self.setup.cuts() && got == wanted && (!log.evicted || far) {
            self.seen.cuts += 1;
            let fresh = self.fresh(&log, wanted, chunk);
            // Where a window dropped tokens, only lengths that a rollback reaches may work.
            match fork.rollback_limit() == fresh.rollback_limit() {
                true => fresh,
                false => near(),
            }
        } else if wanted >= oldest {
            assert_eq!(got, wanted);
            match near() {
                near if near.rollback_limit() == fork.rollback_limit() => near,
                _ => self.fresh(&log, wanted, chunk),
            }
        } else {
            self.seen.checkpoints += 1;
            let (at, kept) = kept.last().unwrap();
            assert_eq!(*at, got);
            kept.fork()
        };
        let tokens = log.tokens[..got as usize].to_vec();
        let evicted = log.evicted;
        let (pair, log) = ([fork, oracle], Log { tokens, kept, evicted });
        twins::check(&self.setup.model, &pair, plain);
        match self.pairs.len() {
            4 => (self.pairs[i], self.logs[i]) = (pair, log),
            _ => {
                self.pairs.push(pair);
                self.logs.push(log);
            }
        }
    }

    fn seal(&mut self, i: usize) {
        let sequence = &mut self.pairs[i][0];
        match sequence.seal() {
            Ok(()) => {}
            Err(Error::OutOfBudget { .. }) if self.setup.budget.is_some() => return,
            Err(other) => panic!("{other}"),
        }
        self.seen.sealed += 1;
        let taken = self.caches[0].usage().taken;
        sequence.seal().unwrap();
        assert_eq!(self.caches[0].usage().taken, taken);
    }

    /// Tokens that are held, over layers and heads.
    fn resident(&self, i: usize) -> u32 {
        let Model { layers, kv_heads, .. } = self.setup.model;
        let heads = (0..layers).flat_map(|layer| (0..kv_heads as usize).map(move |head| (layer, head)));
        heads.map(|(layer, head)| self.pairs[i][1].resident(layer, head).unwrap().0).sum()
    }

    /// A copy of the second sequence of a pair that shares nothing with it, so that writes of others to shared lists or pages do not show
    /// in it.
    fn restored(&self, i: usize) -> Sequence {
        let mut bytes = Vec::new();
        self.pairs[i][1].save(&[], &mut bytes).unwrap();
        self.caches[1].restore(&mut &bytes[..]).unwrap().sequence
    }

    fn change(&mut self, change: &Change) {
        let at = |sequence: u8| at(&self.pairs, sequence);
        match *change {
            Change::Rollback { sequence, n } => {
                let i = at(sequence);
                let [a, b] = self.pairs[i].each_mut().map(|sequence| sequence.rollback(n));
                assert_eq!(a, b);
                let len = self.pairs[i][0].next_position().0;
                self.logs[i].tokens.truncate(len as usize);
                self.logs[i].kept.retain(|(at, _)| *at <= len);
                return;
            }
            Change::Fork { sequence } => {
                let i = at(sequence);
                if self.pairs.len() < 4 {
                    self.seen.forks += 1;
                    self.pairs.push([self.pairs[i][0].fork(), self.restored(i)]);
                    self.logs.push(self.logs[i].clone());
                }
                return;
            }
            Change::Drop { sequence } => {
                let i = at(sequence);
                if self.pairs.len() > 1 {
                    self.logs.swap_remove(i);
                }
            }
            Change::Evict { sequence, .. } | Change::EvictAll { sequence } => {
                let i = at(sequence);
                let before = self.resident(i);
                change.apply(&self.setup.model, &mut self.pairs);
                self.logs[i].evicted |= self.resident(i) < before;
                return;
            }
            Change::Clear { sequence } => {
                let i = at(sequence);
                self.logs[i] = Log::default();
            }
        }
        change.apply(&self.setup.model, &mut self.pairs);
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Step { parts, read, abort } => self.step(parts, *read, *abort),
            Op::Cut { sequence, at: share, chunk } => self.cut(at(&self.pairs, *sequence), *share, *chunk),
            Op::Checkpoint { sequence } => {
                let i = at(&self.pairs, *sequence);
                self.pairs[i][0].checkpoint().unwrap();
                let (len, kept) = (self.pairs[i][0].next_position().0, &mut self.logs[i].kept);
                kept.retain(|(at, _)| *at != len);
                kept.push((len, std::rc::Rc::new(self.pairs[i][1].fork())));
            }
            Op::DropCheckpoints { sequence, from } => {
                let i = at(&self.pairs, *sequence);
                self.pairs[i][0].drop_checkpoints(from..);
                self.logs[i].kept.retain(|(at, _)| at < from);
            }
            Op::Seal { sequence } => self.seal(at(&self.pairs, *sequence)),
            Op::Demote { sequence } => {
                let i = at(&self.pairs, *sequence);
                match self.pairs[i][0].demote(u64::MAX) {
                    Ok(_) | Err(Error::NoTiers) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Op::DemoteAll => {
                let [cache, _] = &self.caches;
                let taken = cache.usage().taken;
                match cache.demote(self.pairs.iter_mut().map(|pair| &mut pair[0]), u64::MAX) {
                    Ok(freed) => {
                        assert_eq!(taken - cache.usage().taken, freed);
                        self.seen.together += u32::from(freed > 0 && self.pairs.len() > 1);
                    }
                    Err(Error::NoTiers) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Op::Pin { sequence, from } => {
                let i = at(&self.pairs, *sequence);
                self.pairs[i].iter_mut().for_each(|sequence| sequence.pin(*from..from + 20));
            }
            Op::Change(change) => self.change(change),
        }
    }

    fn check(&mut self) {
        let (model, mut near) = (&self.setup.model, 0);
        for (pair, log) in self.pairs.iter().zip(&self.logs) {
            assert!(pair[0].checkpoints().eq(log.kept.iter().map(|(at, _)| *at)));
            twins::check(model, pair, plain);
            near += pair[0].bytes();
            for head in (0..model.layers).flat_map(|l| (0..model.kv_heads as usize).map(move |h| (l, h))) {
                for page in pair[0].pages(head.0, head.1).unwrap() {
                    self.seen.shared += u32::from(page.shared && page.id.place != Place::Ring);
                    self.seen.away += u32::from(page.tier > 0);
                }
            }
        }
        let usage = self.caches[0].usage();
        assert!(usage.taken <= usage.budget && usage.taken <= near, "{} {near}", usage.taken);
        assert!(usage.taken == near || self.pairs.len() > 1, "{} {near}", usage.taken);
    }
}

/// The tier of a page, and whether it is shared, are not compared.
fn plain(page: &mut PageInfo) {
    (page.tier, page.shared) = (0, false);
}

fn run(setup: &Setup, ops: &[Op]) -> Seen {
    let caches = setup.caches();
    let pairs = vec![caches.each_ref().map(Cache::sequence)];
    let logs = vec![Log::default()];
    let mut twins = Twins { setup, caches, pairs, logs, values: Values::default(), seen: Seen::default() };
    for op in ops {
        twins.apply(op);
        twins.check();
    }
    twins.pairs.clear();
    assert_eq!(twins.caches[0].usage().taken, 0);
    twins.seen
}

proptest! {
    #![proptest_config(pikv_test::cases(120, 1500))]
    #[test]
    fn wherever_a_sequence_is_cut(setup in setup(), ops in proptest::collection::vec(op(), 1..60)) {
        run(&setup, &ops);
    }
}

/// The histories above reach the critical cases.
#[test]
fn histories_reach_what_they_are_for() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut sum = Seen::default();
    let strategy = (setup(), proptest::collection::vec(op(), 30..60));
    for _ in 0..40 {
        let (setup, ops) = strategy.new_tree(&mut runner).unwrap().current();
        let Seen { cuts, forks, checkpoints, refused, sealed, shared, away, together } = run(&setup, &ops);
        sum.cuts += cuts;
        sum.forks += forks;
        sum.checkpoints += checkpoints;
        sum.refused += refused;
        sum.sealed += sealed;
        sum.shared += shared;
        sum.away += away;
        sum.together += together;
    }
    let Seen { cuts, forks, checkpoints, refused, sealed, shared, away, together } = sum;
    assert!(cuts > 60 && checkpoints > 10 && refused > 10 && sealed > 60 && shared > 500, "{sum:?}");
    assert!(away > 100 && forks > 20 && together > 10, "{sum:?}");
}

/// Adds tokens to sequences, the same to each.
fn add(cache: &Cache, sequences: &mut [Sequence], n: usize) {
    let (rows, dim) = (sequences.len() * n, 64);
    let mut step = cache.begin(sequences.iter_mut().map(|sequence| (sequence, n as u32))).unwrap();
    step.append(0, &vec![0.5; rows * dim], &vec![0.25; rows * dim]).unwrap();
    step.commit().unwrap();
}

fn config() -> CacheConfig {
    let layer = LayerShape::new(1, 1, 64, Dtype::Bf16);
    CacheConfig::new(vec![layer], 64 << 20).backend(pikv_test::backend::backend())
}

/// Eight forks of a prompt, with 512 tokens each and the default ring: shared pages are stored once.
#[test]
fn a_sealed_prompt_is_stored_once() {
    let cache = Cache::new(config()).unwrap();
    let page = cache.config().layers[0].layout.bytes();
    for prompt in [256, 1024, 8192] {
        let mut sequence = [cache.sequence()];
        for _ in 0..prompt / 128 {
            add(&cache, &mut sequence, 128);
        }
        let ideal = (prompt as u64 + 8 * 512) / 32 * page;
        for sealed in [false, true] {
            if sealed {
                sequence[0].seal().unwrap();
            }
            let mut forks: Vec<Sequence> = (0..8).map(|_| sequence[0].fork()).collect();
            (0..4).for_each(|_| add(&cache, &mut forks, 128));
            let ratio = cache.usage().taken as f64 / ideal as f64;
            assert!(
                (ratio <= 1.05) == sealed || (prompt == 8192 && ratio < 1.2),
                "{prompt} {sealed}: {ratio}"
            );
        }
    }
}

/// Prefixes of any length of one sequence, each the start of the next, share its pages. No page is copied where a page of the ring can
/// be one of the run.
#[test]
fn cuts_of_one_sequence_take_no_page() {
    let cache = Cache::new(config()).unwrap();
    let mut sequence = [cache.sequence()];
    (0..8).for_each(|_| add(&cache, &mut sequence, 128));
    let taken = cache.usage().taken;
    let forks: Vec<Sequence> = (0..=1024).step_by(96).map(|len| sequence[0].fork_at(len).unwrap()).collect();
    assert_eq!(cache.usage().taken, taken);
    drop(forks);
    assert_eq!(cache.usage().taken, taken);
}

#[test]
fn over_a_fabric_a_rollback_and_a_checkpoint_are_what_a_fork_goes_back_to() {
    let layer = LayerShape::new(1, 1, 64, Dtype::Bf16);
    let shards = ShardMap::sum(2).unwrap();
    let config = CacheConfig::new(vec![layer], 1 << 20).ring(32).rollback(8).shards(shards);
    let ranks = InProcess::new(&config, 2, 1 << 20).unwrap();
    let cache = Cache::over(config, Box::new(ranks), Options::default()).unwrap();
    let mut sequence = [cache.sequence()];
    add(&cache, &mut sequence, 100);
    sequence[0].checkpoint().unwrap();
    add(&cache, &mut sequence, 100);
    let [mut sequence] = sequence;
    assert_eq!(sequence.fork_at(195).unwrap().next_position().0, 195);
    assert_eq!(sequence.fork_at(150).unwrap().next_position().0, 100);
    let refused = sequence.fork_at(99).map(|_| ()).unwrap_err();
    let message = "a fork at 99 of 200 tokens: its full pages lie on the ranks of a fabric; lengths that would do: 192 to 200, and \
                   those of checkpoints: [100]";
    assert_eq!(refused.to_string(), message);
    assert!(matches!(sequence.seal(), Err(Error::OverFabric { .. })));
}

/// A checkpoint replaces one at the same length, so repeated checkpoints take no more memory.
#[test]
fn checkpoints_of_one_length_are_one() {
    let cache = Cache::new(config()).unwrap();
    let mut sequence = [cache.sequence()];
    add(&cache, &mut sequence, 100);
    let [mut sequence] = sequence;
    sequence.checkpoint().unwrap();
    let (tables, bytes) = (sequence.table_bytes(), sequence.bytes());
    (0..100).for_each(|_| sequence.checkpoint().unwrap());
    assert_eq!((sequence.table_bytes(), sequence.bytes()), (tables, bytes));
    assert_eq!(cache.usage().taken, bytes);
    sequence.clear();
    assert_eq!(cache.usage().taken, 0);
}

/// Runs with more pages than forks share in one list. A policy evicts from old pages, and a rollback restores them; both write to
/// copies. Sequence and fork continue, each compared with one that was saved and restored.
#[test]
fn what_a_policy_does_to_long_runs_in_common_shows_in_no_fork() {
    let layer = LayerShape::new(1, 1, 8, Dtype::Bf16);
    let config = CacheConfig::new(vec![layer], 64 << 20).ring(8).rollback(12);
    let config = config.evict(Eviction::new(H2o, Budget::Tokens(900)).batch(16));
    let cache = Cache::new(config.backend(pikv_test::backend::backend())).unwrap();
    let copy = |sequence: &Sequence| {
        let mut bytes = Vec::new();
        sequence.save(&[], &mut bytes).unwrap();
        cache.restore(&mut &bytes[..]).unwrap().sequence
    };
    let mut seed = 0u32;
    let mut add = |sequences: &mut [&mut Sequence], n: usize| {
        seed += 1;
        let rows = |salt: u32| -> Vec<f32> {
            let x =
                |i: u32| ((i.wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(salt)) >> 16) as f32 / 1e4 - 3.0;
            (0..8 * n as u32).map(x).collect()
        };
        let (k, v, q) = (rows(77_773), rows(99_991), rows(55_551));
        let outs = sequences.iter_mut().map(|sequence| {
            let (mut step, mut out) = (cache.begin([(&mut **sequence, n as u32)]).unwrap(), vec![0.0; 8 * n]);
            step.append(0, &k, &v).unwrap();
            step.attend(0, &q, &Attend::new(0.3), AttendOutput::new(&mut out)).unwrap();
            step.commit().unwrap();
            bits(&out)
        });
        let outs: Vec<Vec<u32>> = outs.collect();
        assert!(outs.windows(2).all(|two| two[0] == two[1]));
    };
    let mut sequence = cache.sequence();
    (0..300).for_each(|_| add(&mut [&mut sequence], 4));
    let pages = |sequence: &Sequence| sequence.pages(0, 0).unwrap().count();
    assert!(pages(&sequence) > 25);
    for round in 0..40 {
        let (mut fork, mut alone) = (sequence.fork(), copy(&sequence));
        // Lists are in common, pages are not counted twice: the rollback takes its own.
        assert_eq!((fork.rollback(round % 12), alone.rollback(round % 12)), (Ok(()), Ok(())));
        let mut beside = copy(&sequence);
        for _ in 0..4 {
            add(&mut [&mut fork, &mut alone], 1 + round as usize % 5);
            add(&mut [&mut sequence, &mut beside], 4);
        }
        for (one, other) in [(&fork, &alone), (&sequence, &beside)] {
            assert_eq!(one.resident(0, 0), other.resident(0, 0));
            assert_eq!((one.bytes(), pages(one)), (other.bytes(), pages(other)));
        }
    }
}
