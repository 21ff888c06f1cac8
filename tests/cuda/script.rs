//! A script of calls to a cache, for any back end, and its results.

use crate::engine::{Engine, rounded};
use pikv::cuda::DeviceOutput;
use pikv::report::Place;
use pikv::router::Eplb;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, ReadPages, Rows, Sequence};

pub fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(1, |h, &part| {
        let z = (h ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 32)
    })
}

/// In [-1, 1).
pub fn noise(parts: &[u64], n: usize) -> Vec<f32> {
    let h = mix(parts);
    (0..n as u64).map(|i| (mix(&[h, i]) >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

/// One thing done.
#[derive(Clone, Debug)]
pub enum Op {
    /// A step: tokens for sequences.
    Feed(Vec<(usize, u32)>),
    /// The same, without attention.
    Fill(Vec<(usize, u32)>),
    /// The same, dropped after that many layers.
    Abandon(Vec<(usize, u32)>, usize),
    Fork(usize),
    Rollback(usize, u32),
    /// Frees the page of that index, of those outside the ring.
    Evict(usize, usize),
    /// The last rows again, outside a step.
    Ask(usize, u32),
    Drop(usize),
    /// Pins positions.
    Pin(usize, u32, u32),
    /// Moves a number of bytes to lower tiers, or back.
    Demote(usize, u64),
    Promote(usize, u64),
    /// Over ranks: places a layer's experts anew by loads that the number draws.
    Rebalance(usize, u64),
    /// Over ranks: replicates an expert's pages to a number of ranks, or to all.
    Replicate(usize, u16, u32),
}

/// Options of attention and of the comparison.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    pub softcap: Option<f32>,
    pub closed_gaps: bool,
    /// Rows read their own experts' pages alone.
    pub own_experts: bool,
    /// Rows read this many pages, chosen by their bounds; 0 for all.
    pub quest: u32,
    /// The mass of every page is recorded.
    pub mass: bool,
    /// Places of pages are not recorded.
    pub anywhere: bool,
    /// An append that fails is tried once more, in the same step.
    pub again: bool,
    /// Tensors of steps lie on the device of the cache.
    pub in_place: bool,
    /// Dtypes of keys, values, queries and outputs of steps, if not all f32; host values are rounded likewise.
    pub dtypes: Option<[Dtype; 4]>,
}

impl Options {
    /// Random options; `below(n)` is a random number below `n`.
    pub fn drawn(below: &mut impl FnMut(u64) -> u64) -> Options {
        Options {
            softcap: (below(4) == 0).then_some(3.0),
            closed_gaps: below(4) == 0,
            own_experts: below(4) == 0,
            mass: below(3) == 0,
            dtypes: Some([0; 4].map(|_| Dtype::ALL[below(3) as usize])),
            ..Options::default()
        }
    }
}

/// A cache, its sequences, and all their results, as bits.
pub struct Run {
    pub cache: Cache,
    pub sequences: Vec<Sequence>,
    pub options: Options,
    pub record: Vec<u32>,
    /// Errors of appends that were repeated.
    pub failed: Vec<Error>,
    tokens: u64,
}

impl Run {
    pub fn new(config: CacheConfig, options: Options) -> Result<Run, Error> {
        Ok(Run::of(Cache::new(config)?, options))
    }

    pub fn of(cache: Cache, options: Options) -> Run {
        let sequences = vec![cache.sequence()];
        Run { cache, sequences, options, record: Vec::new(), failed: Vec::new(), tokens: 0 }
    }

    fn attend(&self, shape: &LayerShape) -> Attend {
        let attend = Attend::new((shape.layout.k_dim as f32).powf(-0.5));
        let attend = if self.options.own_experts { attend.read(ReadPages::Experts) } else { attend };
        let attend = match self.options.quest {
            0 => attend,
            pages => attend.read(ReadPages::Quest { pages }),
        };
        let attend = attend.closed_gaps(self.options.closed_gaps && shape.rope.is_some());
        self.options.softcap.map_or(attend, |cap| attend.softcap(cap))
    }

    /// Does one thing. What failed leaves no trace in the record, and may be done again.
    pub fn act(&mut self, op: &Op) -> Result<(), Error> {
        match op {
            Op::Feed(parts) => self.step(parts, usize::MAX, true)?,
            Op::Fill(parts) => self.step(parts, usize::MAX, false)?,
            Op::Abandon(parts, layers) => self.step(parts, *layers, true)?,
            Op::Fork(at) => self.sequences.push(self.sequences[*at].fork()),
            Op::Rollback(at, n) => {
                let sequence = &mut self.sequences[*at];
                let n = (*n).min(sequence.rollback_limit());
                sequence.rollback(n)?;
            }
            Op::Evict(at, page) => {
                let sequence = &mut self.sequences[*at];
                let pages: Vec<_> = sequence.pages(0, 0)?.filter(|p| p.id.place != Place::Ring).collect();
                if !pages.is_empty() {
                    sequence.evict(0, 0, pages[page % pages.len()].id)?;
                }
            }
            Op::Ask(at, rows) => {
                let sequence = &self.sequences[*at];
                let len = sequence.next_position().0;
                let rows = (*rows).min(sequence.rollback_limit() + 1).min(len);
                let mut results = Vec::new();
                for (layer, shape) in self.cache.config().layers.iter().enumerate() {
                    let heads = rows as usize * shape.query_heads as usize;
                    let q = noise(&[u64::from(len), layer as u64, 7], heads * shape.layout.k_dim as usize);
                    let (mut out, mut lse) =
                        (vec![f32::NAN; heads * shape.layout.v_dim as usize], vec![f32::NAN; heads]);
                    let asked = [Rows::new(sequence, pikv::Position(len - rows), rows)];
                    let output = AttendOutput::new(&mut out).lse(&mut lse);
                    self.cache.attend(layer, &asked, &q, &self.attend(shape), output)?;
                    results.extend(out.iter().chain(&lse).map(|x| x.to_bits()));
                }
                self.record.extend(results);
            }
            Op::Pin(at, from, to) => self.sequences[*at].pin(*from..*to),
            Op::Demote(at, bytes) => {
                let moved = self.sequences[*at].demote(*bytes)?;
                self.record.push(if self.options.anywhere { 0 } else { moved as u32 });
            }
            Op::Promote(at, bytes) => {
                let moved = self.sequences[*at].promote(*bytes)?;
                self.record.push(if self.options.anywhere { 0 } else { moved as u32 });
            }
            Op::Drop(at) => self.sequences[*at] = self.cache.sequence(),
            Op::Rebalance(layer, seed) => {
                if let Ok(ranks) = self.cache.ranks() {
                    let (ranks, experts) = (ranks.len() as u32, self.cache.config().experts);
                    let loads: Vec<f64> =
                        (0..u64::from(experts)).map(|e| 1.0 + (mix(&[*seed, e]) % 9) as f64).collect();
                    let eplb = Eplb::global((experts + ranks).next_multiple_of(ranks), ranks);
                    self.cache.rebalance(*layer, &eplb, Some(&loads))?;
                }
            }
            Op::Replicate(layer, expert, copies) => {
                if let Ok(ranks) = self.cache.ranks() {
                    self.cache.replicate(*layer, *expert, (*copies).min(ranks.len() as u32))?;
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, parts: &[(usize, u32)], layers: usize, attends: bool) -> Result<(), Error> {
        let (cache, id) = (self.cache.clone(), self.tokens);
        let config = cache.config();
        let mut results = Vec::new();
        let options: Vec<Attend> = config.layers.iter().map(|shape| self.attend(shape)).collect();
        let failed = &mut self.failed;
        let chosen = self
            .sequences
            .iter_mut()
            .enumerate()
            .filter_map(|(i, s)| parts.iter().find(|(at, _)| *at == i).map(|(_, n)| (s, *n)));
        let Options { own_experts, mass: mass_too, again, in_place, dtypes, .. } = self.options;
        let [k_type, v_type, q_type, out_type] = dtypes.unwrap_or([Dtype::F32; 4]);
        let drawn = |row: &[u64], n, dtype| -> Vec<f32> {
            noise(row, n).into_iter().map(|x| rounded(x, dtype)).collect()
        };
        let mut engine = in_place.then(|| Engine::new(&config.backend));
        let mut waiting = Vec::new();
        let mut step = cache.begin(chosen)?;
        let rows = step.rows();
        for (layer, shape) in config.layers.iter().enumerate().take(layers) {
            let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
            let (kv, heads) = (rows * shape.kv_heads as usize, rows * shape.query_heads as usize);
            let row = |kind| [id, layer as u64, kind];
            let (k, v) = (drawn(&row(0), kv * k_dim, k_type), drawn(&row(1), kv * v_dim, v_type));
            let tensors = engine
                .as_mut()
                .map(|engine| (engine.put_of(k.clone(), k_type), engine.put_of(v.clone(), v_type)));
            let mut append = || match tensors {
                Some((k, v)) => step.append_device(layer, k, v),
                None => step.append(layer, &k, &v),
            };
            match append() {
                Err(e) if again => {
                    failed.push(e);
                    append()?;
                }
                done => done?,
            }
            let chosen: Vec<u16> = (0..rows as u64)
                .flat_map(|r| {
                    let first = mix(&[id, r, layer as u64, 3]) % u64::from(config.experts);
                    (0..u64::from(config.top_k))
                        .map(move |i| ((first + i) % u64::from(config.experts)) as u16)
                })
                .collect();
            // Rows that read their own experts' pages need the experts.
            if own_experts {
                step.route(layer, &chosen)?;
            }
            let q = drawn(&row(2), heads * k_dim, q_type);
            if let Some(engine) = engine.as_mut().filter(|_| attends) {
                let q = engine.put_of(q, q_type);
                let (out, lse) = (engine.room_of(heads * v_dim, out_type), engine.room(heads));
                step.attend_device(layer, q, &options[layer], DeviceOutput::new(out).lse(lse))?;
                waiting.extend([out, lse]);
            } else if attends {
                let (mut out, mut lse) = (vec![f32::NAN; heads * v_dim], vec![f32::NAN; heads]);
                let mut mass = Vec::new();
                let output = AttendOutput::new(&mut out).lse(&mut lse);
                let output = if mass_too { output.mass(&mut mass) } else { output };
                step.attend(layer, &q, &options[layer], output)?;
                results.extend(out.iter().map(|x| rounded(*x, out_type).to_bits()));
                results.extend(lse.iter().map(|x| x.to_bits()));
                results.extend(mass.iter().flat_map(|page| page.tokens).map(f32::to_bits));
            }
            if !own_experts {
                step.route(layer, &chosen)?;
            }
        }
        if layers == usize::MAX {
            if in_place {
                step.check()?;
            }
            step.commit()?;
        } else {
            drop(step);
        }
        if let Some(engine) = &mut engine {
            results.extend(waiting.into_iter().flat_map(|of| engine.read(of)).map(f32::to_bits));
        }
        self.tokens += 1;
        self.record.extend(results);
        Ok(())
    }

    /// Every page and every token that is stored.
    pub fn look(&mut self) -> Result<(), Error> {
        let usage = self.cache.usage();
        let bytes = usage.shards.iter().copied().chain(usage.tiers.iter().map(|tier| tier.bytes));
        let anywhere = self.options.anywhere;
        self.record.extend(bytes.filter(|_| !anywhere).map(|bytes| bytes as u32));
        for sequence in &self.sequences {
            for (layer, shape) in self.cache.config().layers.iter().enumerate() {
                for head in 0..shape.kv_heads as usize {
                    for page in sequence.pages(layer, head)? {
                        self.record.extend([
                            page.id.ordinal,
                            page.tokens,
                            page.first.0,
                            page.last.0,
                            if anywhere { 0 } else { page.shard },
                            u32::from(page.packed),
                            if anywhere { 0 } else { page.tier as u32 },
                            page.bytes as u32,
                        ]);
                        let (mut key, mut value) =
                            (vec![0.0; shape.layout.k_dim as usize], vec![0.0; shape.layout.v_dim as usize]);
                        let lanes: Vec<u32> =
                            sequence.positions(layer, head, page.id)?.map(|(lane, _)| lane).collect();
                        for lane in lanes {
                            let position = sequence.read(layer, head, page.id, lane, &mut key, &mut value)?;
                            self.record.push(position.0);
                            self.record.extend(key.iter().chain(&value).map(|x| x.to_bits()));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
