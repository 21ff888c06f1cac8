//! Drafts of a batch: after each step every sequence takes back another number of its tokens. Each is compared with a twin that steps
//! alone, in a cache without lower tiers, and is given only the tokens that stayed.

use super::named::{POLICIES, eviction};
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::Budget;
use pikv::report::Place;
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Sequence};
use pikv_test::backend::backend;
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;

const LAYERS: usize = 2;
const BATCH: usize = 4;
const DIM: usize = 4;
const EXPERTS: u32 = 3;
/// Most tokens of a sequence in a step, all of which can be taken back.
const DRAFT: u32 = 6;

fn config(policy: Option<&str>, code: Option<Code>) -> CacheConfig {
    let layer = LayerShape::new(1, 2, DIM as u32, Dtype::F32);
    let mut config = CacheConfig::new(vec![layer; LAYERS], 1 << 24)
        .ring(8)
        .rollback(DRAFT)
        .experts(EXPERTS, 1)
        .nan_fill(true)
        .backend(backend());
    if let Some(code) = code {
        config = config.compress(Codec::new(Coding::new(code), Coding::new(code)));
    }
    match policy {
        Some(policy) => config.evict(eviction(policy, Budget::Tokens(60), None)),
        None => config,
    }
}

/// Tokens of a sequence in a step: its number in the batch, tokens that stay, and tokens of a draft that is given up.
#[derive(Clone, Copy)]
struct Part {
    id: u64,
    stay: u32,
    draft: u32,
    turn: u64,
}

impl Part {
    /// Numbers of a token: those that stay depend on its position only.
    fn of(&self, first: u32, row: u32, layer: usize, what: u64, n: usize) -> Vec<f32> {
        let branch = if row < self.stay { self.id } else { 1000 + self.turn };
        noise(branch << 40 ^ u64::from(first + row) << 8 ^ (layer as u64) << 4 ^ what, n)
    }
}

/// One step of some sequences; for each the bits of the outputs of the rows that stay.
fn step(cache: &Cache, sequences: &mut [&mut Sequence], parts: &[Part]) -> Vec<Vec<u32>> {
    let firsts: Vec<u32> = sequences.iter().map(|sequence| sequence.next_position().0).collect();
    let tokens = |part: &Part| part.stay + part.draft;
    let mut step =
        cache.begin(sequences.iter_mut().zip(parts).map(|(s, part)| (&mut **s, tokens(part)))).unwrap();
    let mut outputs = vec![Vec::new(); parts.len()];
    for layer in 0..LAYERS {
        let all = |what, n: usize| -> Vec<f32> {
            let rows = firsts.iter().zip(parts).flat_map(|(first, part)| {
                (0..tokens(part)).flat_map(move |row| part.of(*first, row, layer, what, n))
            });
            rows.collect()
        };
        let experts: Vec<u16> =
            all(4, 1).iter().map(|x| (x.to_bits() >> 8) as u16 % EXPERTS as u16).collect();
        step.append(layer, &all(1, DIM), &all(2, DIM)).unwrap();
        step.route(layer, &experts).unwrap();
        let mut out = vec![0.0; step.rows() * 2 * DIM];
        step.attend(layer, &all(3, 2 * DIM), &Attend::new(0.7), AttendOutput::new(&mut out)).unwrap();
        let mut rest = &out[..];
        for (part, outputs) in parts.iter().zip(&mut outputs) {
            let (own, others) = rest.split_at(tokens(part) as usize * 2 * DIM);
            outputs.extend(bits(&own[..part.stay as usize * 2 * DIM]));
            rest = others;
        }
    }
    step.commit().unwrap();
    outputs
}

/// The pages outside the ring, with the positions of their tokens.
fn held(sequence: &Sequence) -> Vec<(String, Vec<u32>)> {
    let of = |layer: usize| {
        let pages = sequence.pages(layer, 0).unwrap().filter(|page| page.id.place != Place::Ring);
        pages.map(move |page| {
            let positions = sequence.positions(layer, 0, page.id).unwrap();
            (format!("{layer} {}", page.id), positions.map(|(_, position)| position.0).collect())
        })
    };
    (0..LAYERS).flat_map(of).collect()
}

fn history(policy: Option<&str>, code: Option<Code>, seed: u64) -> u64 {
    let mut rng = Rng(seed);
    let mine = Cache::new(config(policy, code).tiers(Tiers::new().host(1 << 24))).unwrap();
    let theirs = Cache::new(config(policy, code)).unwrap();
    let mut batch: Vec<Sequence> = (0..BATCH).map(|_| mine.sequence()).collect();
    let mut alone: Vec<Sequence> = (0..BATCH).map(|_| theirs.sequence()).collect();
    let mut lower = 0;
    for turn in 0..60 {
        let parts: Vec<Part> = (0..BATCH as u64)
            .map(|id| {
                let draft = rng.below(DRAFT);
                // Often one token stays, as where a model refuses the first of a draft.
                let stay = if rng.one_in(2) { 1 } else { 1 + rng.below(DRAFT - draft) };
                Part { id, stay, draft, turn }
            })
            .collect();
        let got = step(&mine, &mut batch.iter_mut().collect::<Vec<_>>(), &parts);
        // In any order.
        for i in [2, 0, 3, 1] {
            batch[i].rollback(parts[i].draft).unwrap();
        }
        for (i, (sequence, got)) in alone.iter_mut().zip(got).enumerate() {
            let part = Part { draft: 0, ..parts[i] };
            let context = format!("{policy:?}, {code:?}, seed {seed}, turn {turn}, sequence {i}");
            assert_eq!(got, step(&theirs, &mut [&mut *sequence], &[part])[0], "{context}");
            assert_eq!(batch[i].next_position(), sequence.next_position(), "{context}");
            assert_eq!(held(&batch[i]), held(sequence), "{context}");
        }
        if rng.one_in(5) {
            let bytes = u64::from(rng.below(10_000));
            lower += mine.demote(&mut batch, bytes).unwrap();
        }
    }
    lower
}

#[test]
fn each_of_a_batch_takes_back_its_own_draft() {
    let mut lower = 0;
    for (i, policy) in (0..).zip([None].into_iter().chain(POLICIES.map(Some))) {
        for round in 0..scaled(1, 20) {
            for (j, code) in (0..).zip([None, Some(Code::Int4)]) {
                lower += history(policy, code, round << 16 | i << 8 | j);
            }
        }
    }
    assert!(lower > 0);
}
