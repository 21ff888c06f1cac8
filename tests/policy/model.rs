//! A slow model of the store with policies: the positions that each head holds, a policy's state by its definition from the observed
//! masses, and the evicted tokens. Masses are compared with attention in f64 over exactly the tokens held.

use crate::setup::{Event, Kind, Log, Row, Spy, attention, close, eviction, held, row, run, turned};
use pikv::policy::{
    Budget, Chunks, DuoLit, Eviction, FastVReceived, H2o, KeyNorm, Lru, LruPlus, MassFeedback, Policy,
    SnapKv, StreamingLlm, Tova,
};
use pikv::report::Place;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Sequence};
use pikv_test::runs;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::ops::Range;

/// A policy by its definition.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Def {
    Lru,
    LruPlus,
    H2o,
    Streaming,
    Snap {
        window: u32,
        pool: u32,
    },
    Tova,
    KeyNorm,
    FastV,
    DuoLit,
    /// Chunks of H2O.
    Chunks(u32),
}

pub const ALL: [Def; 11] = [
    Def::Lru,
    Def::LruPlus,
    Def::H2o,
    Def::Streaming,
    Def::Snap { window: 3, pool: 3 },
    Def::Snap { window: 32, pool: 5 },
    Def::Tova,
    Def::KeyNorm,
    Def::FastV,
    Def::DuoLit,
    Def::Chunks(5),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Over {
    Head,
    Layer,
    Sequence,
}

impl Def {
    pub fn policy(self) -> Box<dyn Policy> {
        match self {
            Def::Lru => Box::new(Lru::default()),
            Def::LruPlus => Box::new(LruPlus::default()),
            Def::H2o => Box::new(H2o),
            Def::Streaming => Box::new(StreamingLlm),
            Def::Snap { window, pool } => Box::new(SnapKv::default().window(window).pool(pool)),
            Def::Tova => Box::new(Tova),
            Def::KeyNorm => Box::new(KeyNorm),
            Def::FastV => Box::new(FastVReceived),
            Def::DuoLit => Box::new(DuoLit),
            Def::Chunks(size) => Box::new(Chunks::new(H2o, NonZeroU32::new(size).unwrap())),
        }
    }

    fn over(self) -> Over {
        match self {
            Def::Tova => Over::Layer,
            Def::DuoLit | Def::FastV => Over::Sequence,
            _ => Over::Head,
        }
    }

    fn born(self, key: &[f32], position: u32) -> [f64; 2] {
        match self {
            Def::Lru | Def::LruPlus => [f64::from(position), 0.0],
            Def::KeyNorm => {
                let square: f64 = key.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                [f64::from(square.sqrt() as f32), 0.0]
            }
            _ => [0.0; 2],
        }
    }

    /// A page was seen.
    fn seen(self, page: &Told, words: &mut BTreeMap<(usize, usize, u32), [f64; 2]>, (l, h): (usize, usize)) {
        let Told { first, rows, group, live, resident, ref tokens } = *page;
        let mut lanes: Vec<f32> = vec![0.0; 32];
        let held = (0..32).filter(|lane| live >> lane & 1 == 1);
        held.zip(tokens).for_each(|(lane, (_, mass))| lanes[lane] = *mass);
        while lanes.len() > 1 {
            let upper = lanes.split_off(lanes.len() / 2);
            lanes.iter_mut().zip(upper).for_each(|(sum, mass)| *sum += mass);
        }
        let sum = lanes[0];
        let fair = (rows * group) as f32 * tokens.len() as f32 / resident as f32;
        let used = sum > 0.0 && sum >= fair;
        let now = f64::from(first + rows - 1);
        let add = |x: f64, y: f32| f64::from(x as f32 + y);
        for (position, mass) in tokens {
            let [a, b] = words.get_mut(&(l, h, *position)).unwrap();
            match self {
                Def::H2o | Def::DuoLit | Def::Chunks(_) => *a = add(*a, *mass),
                Def::FastV => {
                    *a = add(*a, *mass);
                    *b +=
                        f64::from((first..first + rows).filter(|row| row >= position).count() as u32 * group);
                }
                Def::Tova => *a = f64::from(*mass),
                Def::Snap { window, .. } => {
                    let share = rows.min(window) as f32 / window as f32;
                    *a = f64::from(*a as f32 * (1.0 - share) + mass / window as f32);
                }
                Def::Lru if used => *a = now,
                Def::LruPlus if used => {
                    // Right to half an ulp, as the store's nearly always is.
                    let faded = f64::from(0.99f32).powf(now - *a) as f32;
                    (*a, *b) = (now, f64::from(*b as f32 * faded + 1.0));
                }
                _ => {}
            }
        }
    }

    /// Utilities of tokens, by ascending position.
    fn utilities(self, tokens: &[u32], state: impl Fn(u32) -> [f64; 2], now: u32) -> Vec<f32> {
        let one = |p: &u32| {
            let [a, b] = state(*p);
            match self {
                Def::Streaming => 0.0,
                Def::KeyNorm => -a as f32,
                Def::FastV if b > 0.0 => a as f32 / b as f32,
                Def::FastV => 0.0,
                Def::Lru => a as f32 - now as f32,
                Def::LruPlus => a as f32 - now as f32 + 16.0 * b as f32,
                _ => a as f32,
            }
        };
        let plain: Vec<f32> = tokens.iter().map(one).collect();
        match self {
            Def::Snap { pool, .. } => (0..plain.len())
                .map(|i| {
                    let reach = pool as usize / 2;
                    plain[i.saturating_sub(reach)..plain.len().min(i + reach + 1)].iter().sum::<f32>()
                        / (2 * reach + 1) as f32
                })
                .collect(),
            Def::Chunks(size) => tokens
                .iter()
                .map(|p| {
                    let of =
                        || tokens.iter().zip(&plain).filter(|(q, _)| *q / size == p / size).map(|(_, u)| *u);
                    of().sum::<f32>() / of().count() as f32
                })
                .collect(),
            _ => plain,
        }
    }
}

/// An observation of a page.
struct Told {
    first: u32,
    rows: u32,
    group: u32,
    live: u32,
    resident: u32,
    tokens: Vec<(u32, f32)>,
}

#[derive(Clone, Default)]
struct State {
    /// `[layer][head]`
    held: Vec<Vec<BTreeSet<u32>>>,
    words: BTreeMap<(usize, usize, u32), [f64; 2]>,
}

/// A sequence and its model.
pub struct Model {
    pub cache: Cache,
    pub sequence: Sequence,
    pub rows: Vec<Row>,
    pub pins: Vec<Range<u32>>,
    log: Log,
    def: Def,
    eviction: Eviction,
    now: State,
    /// States by length; inside a step, before evictions.
    past: HashMap<u32, State>,
    /// Lengths at which steps ended.
    ends: Vec<u32>,
}

impl Model {
    /// Wraps `def` in a spy; `rule` sets further options.
    pub fn new(config: CacheConfig, def: Def, budget: Budget, rule: impl Fn(Eviction) -> Eviction) -> Model {
        let log = Log::default();
        let eviction = rule(eviction(Box::new(Spy { of: def.policy(), log: log.clone() }), budget));
        let cache = Cache::new(config.evict(eviction.clone())).unwrap();
        let held = cache.config().layers.iter().map(|l| vec![BTreeSet::new(); l.kv_heads as usize]).collect();
        let now = State { held, words: BTreeMap::new() };
        let sequence = cache.sequence();
        let past = HashMap::from([(0, now.clone())]);
        let ends = vec![0];
        Model { cache, sequence, rows: Vec::new(), pins: Vec::new(), log, def, eviction, now, past, ends }
    }

    pub fn fork(&self) -> Model {
        Model {
            cache: self.cache.clone(),
            sequence: self.sequence.fork(),
            rows: self.rows.clone(),
            pins: self.pins.clone(),
            log: self.log.clone(),
            def: self.def,
            eviction: self.eviction.clone(),
            now: self.now.clone(),
            past: self.past.clone(),
            ends: self.ends.clone(),
        }
    }

    pub fn pin(&mut self, positions: Range<u32>) {
        self.sequence.pin(positions.clone());
        self.pins.push(positions);
    }

    pub fn len(&self) -> u32 {
        self.rows.len() as u32
    }

    /// Appends `n` tokens in a step, and checks everything.
    pub fn step(&mut self, n: u32, kind: Kind, salt: u64) {
        let old = self.len();
        let config = self.cache.config().clone();
        let fresh: Vec<Row> = (old..old + n).map(|p| row(&config, kind, salt << 32 | u64::from(p))).collect();
        let mut outs: Vec<Vec<f32>> = Vec::new();
        run(&self.cache, &mut self.sequence, &fresh, |step, layer, q, size| {
            let mut out = vec![0.0; size];
            step.attend(layer, q, &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
            outs.push(out);
        });
        self.rows.extend(fresh);
        for (l, shape) in config.layers.iter().enumerate() {
            for h in 0..shape.kv_heads as usize {
                self.now.held[l][h].extend(old..old + n);
                let dim = shape.layout.k_dim as usize;
                for p in old..old + n {
                    let key = &self.rows[p as usize].k[l][h * dim..][..dim];
                    self.now.words.insert((l, h, p), self.def.born(key, p));
                }
            }
            self.check_outputs(l, old, &outs[l]);
        }
        let events = std::mem::take(&mut *self.log.lock().unwrap());
        self.observe(old, old + n, &events);
        self.enforce(&events);
        self.ends.push(old + n);
        self.check();
    }

    /// Takes tokens back.
    pub fn rollback(&mut self, n: u32) {
        let len = self.len() - n;
        self.sequence.rollback(n).unwrap();
        self.now = self.past[&len].clone();
        self.past.retain(|at, _| *at <= len);
        self.rows.truncate(len as usize);
        let events = std::mem::take(&mut *self.log.lock().unwrap());
        self.ends.retain(|end| *end <= len);
        // A step that had ended here would have evicted here; one that did has.
        if self.ends.last() == Some(&len) {
            assert!(!events.iter().any(|event| matches!(event, Event::Ranked { .. })));
        } else {
            self.enforce(&events);
            self.ends.push(len);
        }
        self.check();
    }

    /// Checks that the outputs of rows from `old` on equal attention in f64 over the held tokens.
    fn check_outputs(&self, l: usize, old: u32, out: &[f32]) {
        let shape = &self.cache.config().layers[l];
        let width = shape.layout.v_dim as usize;
        for (i, got) in out.chunks_exact(width).enumerate() {
            let (p, head) = (old + i as u32 / shape.query_heads, i % shape.query_heads as usize);
            let (want, _) = self.attend(l, p, head);
            close(got, &want, 1e-5);
        }
    }

    /// Attention of a row in f64, with the weight of every position that it sees.
    fn attend(&self, l: usize, p: u32, head: usize) -> (Vec<f64>, Vec<(u32, f64)>) {
        let shape = &self.cache.config().layers[l];
        let h = head / shape.group() as usize;
        let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
        let seen: Vec<u32> = self.now.held[l][h].iter().copied().filter(|at| *at <= p).collect();
        let token = |at: &u32| {
            let row = &self.rows[*at as usize];
            let key = turned(&row.k[l][h * k_dim..][..k_dim], shape.rope.as_ref(), f64::from(*at));
            (key, row.v[l][h * v_dim..][..v_dim].iter().map(|x| f64::from(*x)).collect())
        };
        let tokens: Vec<(Vec<f64>, Vec<f64>)> = seen.iter().map(token).collect();
        let query = &self.rows[p as usize].q[l][head * k_dim..][..k_dim];
        let (out, weights) = attention(&turned(query, shape.rope.as_ref(), f64::from(p)), &tokens, 0.5);
        (out, seen.into_iter().zip(weights).collect())
    }

    /// Runs the definition over the policy's observations, and checks these.
    fn observe(&mut self, old: u32, new: u32, events: &[Event]) {
        let config = self.cache.config().clone();
        let slack = config.rollback.min(new - old);
        let many = old..new - slack;
        let mut cuts: Vec<(Range<u32>, bool)> = Vec::new();
        cuts.extend((!many.is_empty()).then_some((many, false)));
        cuts.extend((new - slack..new).map(|row| (row..row + 1, true)));
        let (mut from, mut heads) = (0, 0);
        let told: Vec<&Event> = events.iter().filter(|e| matches!(e, Event::Seen { .. })).collect();
        for (cut, single) in cuts {
            // Of a group of rows those that the policy wants; a single row always.
            let rows = match self.def.policy().feedback() {
                MassFeedback::None => cut.end..cut.end,
                MassFeedback::LastRows(n) if !single => {
                    cut.start.max(new.saturating_sub(n)).min(cut.end)..cut.end
                }
                _ => cut.clone(),
            };
            for l in 0..config.layers.len() {
                for h in 0..config.layers[l].kv_heads as usize {
                    let pages: Vec<&&Event> = told
                        .iter()
                        .filter(|e| {
                            let Event::Seen { layer, head, first, rows: n, .. } = e else { return false };
                            (*layer, *head) == (l, h) && *first == rows.start && *n == rows.len() as u32
                        })
                        .collect();
                    from += pages.len();
                    heads += usize::from(self.check_hits(l, h, &cut, events));
                    if !rows.is_empty() {
                        self.check_told(l, h, &rows, cut.end, &pages);
                    }
                    for page in pages {
                        let Event::Seen { group, first, rows, live, resident, tokens, .. } = page else {
                            unreachable!()
                        };
                        let told = Told {
                            first: *first,
                            rows: *rows,
                            group: *group,
                            live: *live,
                            resident: *resident,
                            tokens: tokens.clone(),
                        };
                        self.def.seen(&told, &mut self.now.words, (l, h));
                    }
                }
            }
            let mut then = self.now.clone();
            then.held.iter_mut().flatten().for_each(|held| held.retain(|p| *p < cut.end));
            self.past.insert(cut.end, then);
        }
        assert_eq!(from, told.len(), "the policy was told of other rows");
        let words = self.def.policy().words();
        assert_eq!(
            heads,
            events.iter().filter(|e| matches!(e, Event::Head { .. })).count() * usize::from(words > 0)
        );
        self.past.retain(|len, _| *len >= new.saturating_sub(config.rollback));
    }

    /// Whether a head's policy observed some rows, without hits. (`wanted.rs` tests hits.)
    fn check_hits(&self, l: usize, h: usize, rows: &Range<u32>, events: &[Event]) -> bool {
        let told = |e: &Event| match e {
            Event::Head { layer, head, first, rows: n, queries, hits, misses, asked }
                if (*layer, *head, *first, *n) == (l, h, rows.start, rows.len() as u32) =>
            {
                assert!(queries.is_empty());
                assert_eq!((*hits, *misses, *asked), (0.0, 0.0, 0));
                true
            }
            _ => false,
        };
        events.iter().any(told)
    }

    fn sinks(&self, layer: usize) -> u32 {
        self.cache.store(layer).unwrap().sinks
    }

    /// Every held token is observed once, with its weight in f64, and in its page at that length.
    fn check_told(&self, l: usize, h: usize, rows: &Range<u32>, len: u32, pages: &[&&Event]) {
        let config = self.cache.config();
        let shape = &config.layers[l];
        let group = shape.group() as usize;
        let left = len.saturating_sub(config.ring);
        let mut want: BTreeMap<u32, f64> = BTreeMap::new();
        let held = self.now.held[l][h].iter().filter(|p| **p < len);
        want.extend(held.clone().filter(|p| **p >= left.min(self.sinks(l))).map(|p| (*p, 0.0)));
        for p in rows.clone() {
            for head in h * group..(h + 1) * group {
                for (at, weight) in self.attend(l, p, head).1 {
                    if let Some(sum) = want.get_mut(&at) {
                        *sum += weight;
                    }
                }
            }
        }
        let mut got: BTreeMap<u32, f32> = BTreeMap::new();
        for page in pages {
            let Event::Seen { page, resident, tokens, .. } = page else { unreachable!() };
            assert_eq!(*resident as usize, held.clone().count(), "tokens held at {len}");
            for (p, mass) in tokens {
                assert_eq!(page.place == Place::Ring, *p >= left, "{p} in {page} at {len}");
                assert!(got.insert(*p, *mass).is_none(), "{p} is told of twice");
            }
        }
        assert_eq!(
            got.keys().collect::<Vec<_>>(),
            want.keys().collect::<Vec<_>>(),
            "layer {l}, head {h}, rows {rows:?}"
        );
        for ((p, got), want) in got.iter().zip(want.values()) {
            let off = (f64::from(*got) - want).abs();
            assert!(
                off <= 1e-6 * (rows.len() * group) as f64,
                "mass of {p} in rows {rows:?}: {got}, not {want}"
            );
        }
    }

    /// Evicts by the definition.
    fn enforce(&mut self, events: &[Event]) {
        let config = self.cache.config().clone();
        let len = self.len();
        let left = len.saturating_sub(config.ring);
        let heads: Vec<(usize, usize)> =
            (0..config.layers.len()).flat_map(|l| (0..self.now.held[l].len()).map(move |h| (l, h))).collect();
        let mut ranked: HashMap<(usize, usize), (Vec<u32>, Vec<f32>)> = HashMap::new();
        for &(l, h) in &heads {
            let pinned = |p: &u32| self.pins.iter().any(|pin| pin.contains(p));
            let may = self.now.held[l][h]
                .iter()
                .copied()
                .filter(|p| *p < left && *p >= self.sinks(l) && !pinned(p));
            let tokens: Vec<u32> = may.collect();
            let utilities = self.def.utilities(&tokens, |p| self.now.words[&(l, h, p)], len);
            ranked.insert((l, h), (tokens, utilities));
        }
        if self.def.over() != Over::Head {
            let mut sums: BTreeMap<(usize, u32), f32> = BTreeMap::new();
            let key = |l: usize, p: u32| (if self.def.over() == Over::Layer { l } else { 0 }, p);
            for &(l, h) in &heads {
                let (tokens, utilities) = &ranked[&(l, h)];
                tokens.iter().zip(utilities).for_each(|(p, u)| *sums.entry(key(l, *p)).or_default() += u);
            }
            for &(l, h) in &heads {
                let (tokens, utilities) = ranked.get_mut(&(l, h)).unwrap();
                tokens.iter().zip(utilities).for_each(|(p, u)| *u = sums[&key(l, *p)]);
            }
        }
        let filed = |l: usize, h: usize| {
            self.now.held[l][h].iter().filter(|p| **p < left && **p >= self.sinks(l)).count() as u64
        };
        let fixed = |l: usize| u64::from(len.min(config.ring) + left.min(self.sinks(l)));
        let quota = |l: usize, h: usize| match &self.eviction.budget {
            Budget::Tokens(n) => u64::from(*n).saturating_sub(fixed(l)),
            Budget::Layers(layers) => u64::from(layers[l]).saturating_sub(fixed(l)),
            Budget::Heads(heads) => u64::from(heads[l][h]).saturating_sub(fixed(l)),
            Budget::Share(share) => {
                let enough = |n: &u32| *n as f32 / len as f32 >= *share;
                u64::from((0..len).find(enough).unwrap_or(len)).saturating_sub(fixed(l))
            }
            _ => unreachable!(),
        };
        let target = |quota: u64| {
            let batch = self.eviction.batch.map_or((quota / 16).clamp(1, 256), u64::from);
            (quota + 1).saturating_sub(batch)
        };
        let mut gone: Vec<(usize, usize, u32)> = Vec::new();
        for l in 0..config.layers.len() {
            let heads = 0..self.now.held[l].len();
            let held: Vec<u64> = heads.clone().map(|h| filed(l, h)).collect();
            let quotas: Vec<u64> = heads.clone().map(|h| quota(l, h)).collect();
            // Worst first.
            let order = |h: usize| {
                let (tokens, utilities) = &ranked[&(l, h)];
                let mut order: Vec<(f32, u32)> =
                    utilities.iter().copied().zip(tokens.iter().copied()).collect();
                order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
                order
            };
            if let Some(floor) = self.eviction.adaptive {
                let (held, total): (u64, u64) = (held.iter().sum(), quotas.iter().sum());
                if held <= total {
                    continue;
                }
                let stay = target(total);
                let n = (held - stay) as usize;
                let mut rest: Vec<(f32, u32, usize)> = Vec::new();
                // Pins may leave less than the floors: the budget is kept, and the first heads get the rest.
                let pins: usize = heads.clone().map(|h| filed(l, h) as usize - ranked[&(l, h)].0.len()).sum();
                let mut left = (stay as usize).saturating_sub(pins);
                for h in heads {
                    let order = order(h);
                    let pinned = filed(l, h) as usize - order.len();
                    let share = stay as f64 / total.max(1) as f64;
                    let sure = (quotas[h] as f64 * f64::from(floor) * share) as usize;
                    let sure = sure.saturating_sub(pinned).min(order.len()).min(left);
                    left -= sure;
                    let free = order.len() - sure;
                    rest.extend(order[..free].iter().map(|(u, p)| (*u, *p, h)));
                }
                // Of equals the older is evicted, then that of the higher head.
                rest.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(b.2.cmp(&a.2)));
                let n = n.min(rest.len());
                gone.extend(rest[..n].iter().map(|(_, p, h)| (l, *h, *p)));
                continue;
            }
            for h in heads {
                if held[h] <= quotas[h] {
                    continue;
                }
                let n = (held[h] - target(quotas[h])) as usize;
                if !self.eviction.by_page {
                    gone.extend(order(h).into_iter().take(n).map(|(_, p)| (l, h, p)));
                    continue;
                }
                let list = events.iter().rev().find_map(|e| match e {
                    Event::Ranked { layer, head, tokens } if (*layer, *head) == (l, h) => Some(tokens),
                    _ => None,
                });
                let list = list.expect("a head over its budget is ranked");
                assert_eq!(list.iter().map(|t| t.0).collect::<Vec<_>>(), ranked[&(l, h)].0);
                let mut pages: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
                list.iter().enumerate().for_each(|(i, (_, page))| pages.entry(*page).or_default().push(i));
                let utilities = &ranked[&(l, h)].1;
                let mean =
                    |page: &Vec<usize>| page.iter().map(|i| utilities[*i]).sum::<f32>() / page.len() as f32;
                let mut order: Vec<(f32, Vec<usize>)> =
                    pages.into_values().map(|page| (mean(&page), page)).collect();
                order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1[0].cmp(&b.1[0])));
                let mut went = 0;
                for (_, page) in order {
                    if went >= n {
                        break;
                    }
                    went += page.len();
                    gone.extend(page.into_iter().map(|i| (l, h, list[i].0)));
                }
            }
        }
        for (l, h, p) in gone {
            assert!(self.now.held[l][h].remove(&p));
        }
        self.past.insert(len, self.now.clone());
    }

    /// Checks that the store holds the model's tokens, with their values.
    pub fn check(&self) {
        for (l, heads) in self.now.held.iter().enumerate() {
            for (h, want) in heads.iter().enumerate() {
                assert_eq!(
                    &held(&self.sequence, l, h),
                    want,
                    "{:?} at {}: layer {l}, head {h}",
                    self.def,
                    self.len()
                );
            }
        }
    }

    /// Every token that is held reads back to the bit; tokens of a page ascend, and are of experts of its run.
    pub fn check_contents(&self) {
        let config = self.cache.config();
        for (l, shape) in config.layers.iter().enumerate() {
            let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
            let (mut k, mut v) = (vec![0.0; k_dim], vec![0.0; v_dim]);
            for h in 0..shape.kv_heads as usize {
                let mut last: HashMap<Place, u32> = HashMap::new();
                for page in self.sequence.pages(l, h).unwrap() {
                    for (lane, p) in self.sequence.positions(l, h, page.id).unwrap() {
                        assert_eq!(self.sequence.read(l, h, page.id, lane, &mut k, &mut v).unwrap(), p);
                        let row = &self.rows[p.0 as usize];
                        assert_eq!(k, row.k[l][h * k_dim..][..k_dim]);
                        assert_eq!(v, row.v[l][h * v_dim..][..v_dim]);
                        let before = last.insert(page.id.place, p.0);
                        assert!(
                            before.is_none_or(|before| before < p.0),
                            "{} in {} after {before:?}",
                            p.0,
                            page.id
                        );
                        if let Place::Run(e) = page.id.place {
                            let home = row.experts[l][0];
                            assert_eq!(runs::run(config.experts, shape.window, p.0, home), e);
                        }
                    }
                }
            }
        }
    }
}
