//! Random histories of sequences with packed pages, compared with the model: pages, every stored bit, bytes, and the attention of the
//! newest rows. Steps that do not fit the budget change nothing. At the end all memory is free again.

use crate::mix;
use crate::model::{Model, Page};
use crate::setup::{Setup, bits, codec, fill, key, options, shape, snapshot, value};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::lanes::Lanes;
use pikv::report::Place;
use pikv::shape::PAGE;
use pikv::{Cache, Dtype, Error, Sequence};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

#[derive(Clone, Debug)]
enum Op {
    New,
    /// Sequences and tokens; layers that are written before the step is dropped.
    Step(Vec<(usize, u32)>, Option<usize>),
    Rollback(usize, u32),
    Fork(usize),
    Drop(usize),
    Evict(usize, u32),
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = || prop_oneof![3 => Just(1u32), 3 => 1u32..=9, 4 => 10u32..=64];
    let part = move || (0usize..4, tokens());
    prop_oneof![
        1 => Just(Op::New),
        9 => proptest::collection::vec(part(), 1..=2).prop_map(|parts| Op::Step(parts, None)),
        2 => (part(), 0usize..=2).prop_map(|(part, layers)| Op::Step(vec![part], Some(layers))),
        4 => (0usize..4, 0u32..=45).prop_map(|(s, n)| Op::Rollback(s, n)),
        2 => (0usize..4).prop_map(Op::Fork),
        1 => (0usize..4).prop_map(Op::Drop),
        3 => (0usize..4, any::<u32>()).prop_map(|(s, pick)| Op::Evict(s, pick)),
    ]
}

fn setup() -> impl Strategy<Value = Setup> {
    let dims = prop_oneof![Just((8u32, 16u32)), Just((5, 3)), Just((16, 33))];
    let window = prop_oneof![2 => Just(None), 1 => (20u32..=90).prop_map(Some)];
    let ring = prop_oneof![Just(64u32), Just(1), 2u32..=40];
    let codes = (0..Code::ALL.len(), 0..Code::ALL.len(), 0usize..4);
    let rest = (
        prop_oneof![Just(0u32), 1u32..=40],
        0u32..=3,
        prop_oneof![4 => 1u32..=4, 1 => Just(20)],
        0usize..3,
        prop_oneof![2 => Just(None), 1 => (6u64..60).prop_map(Some)],
        prop_oneof![2 => Just(None), 3 => (1u32..=90, 0usize..3).prop_map(Some)],
    );
    (dims, window, ring, codes, rest).prop_map(
        |((k_dim, v_dim), window, ring, (k, v, kind), (rollback, sinks, experts, lanes, pages, age))| {
            let layer = shape(2, 2, k_dim, v_dim, Dtype::ALL[(k + v) % 3]).window(window);
            let plain = codec(Code::ALL[k], Code::ALL[v]);
            let turned = Codec::new(
                Coding::new(Code::ALL[k]).map(Map::hadamard(k_dim).unwrap()),
                Coding::new(Code::ALL[v]),
            );
            let factored = Codec::new(
                Coding::block_pca(Code::ALL[k], 3).unwrap(),
                Coding::means(Code::ALL[v % 3], 1 + v as u32 % 3).unwrap(),
            );
            let second = [
                codec(Code::Int4, Code::Int4),
                codec(Code::Int8, Code::Int4),
                Codec::new(Coding::means(Code::F16, 3).unwrap(), Coding::block_pca(Code::Int8, 2).unwrap()),
            ];
            let bytes = |codec: &Codec| codec.packed(k_dim, v_dim).bytes();
            let least = if kind == 3 { bytes(&factored) } else { bytes(&plain) };
            let age = age.map(|(after, i)| (after, second[i].clone()));
            let all: Vec<Lanes> = Lanes::available().collect();
            Setup {
                layers: 2,
                age: age.filter(|(_, codec)| bytes(codec) < least),
                rollback,
                sinks,
                experts,
                codecs: [
                    vec![Some(plain.clone())],
                    vec![Some(turned), None],
                    vec![None, Some(plain.clone())],
                    vec![Some(factored)],
                ][kind]
                    .clone(),
                lanes: all[lanes % all.len()],
                budget: pages.unwrap_or(10_000) * 4 * layer.layout.bytes(),
                ..Setup::new(layer, ring, plain)
            }
        },
    )
}

struct Live(Sequence, Vec<Model>);

/// Compares all that can be seen of a sequence.
fn check(setup: &Setup, cache: &Cache, live: &Live) -> Result<(), TestCaseError> {
    let Live(sequence, models) = live;
    prop_assert_eq!(sequence.rollback_limit(), models[0].limit(setup));
    prop_assert_eq!(sequence.bytes(), models.iter().map(|model| model.bytes(setup)).sum::<u64>());
    if models.iter().flat_map(|model| model.runs.iter().flatten().flatten()).all(|page| !page.gone) {
        let most = (0..setup.layers).map(|l| cache.bytes_at_most(l, models[0].len()).unwrap()).sum::<u64>();
        prop_assert!(sequence.bytes() <= most, "{} bytes, at most {}", sequence.bytes(), most);
    }
    let got = snapshot(setup, sequence);
    let mut got = got.iter();
    for (l, model) in models.iter().enumerate() {
        for h in 0..setup.layer.kv_heads as usize {
            let filed =
                model.runs[h].iter().enumerate().flat_map(|(c, run)| run.iter().map(move |page| (c, page)));
            for (c, page) in filed.filter(|(_, page)| page.held()) {
                let Some((info, tokens)) = got.next() else { panic!("pages are missing") };
                let place = if c == 0 { Place::Sinks } else { Place::Run(c as u16 - 1) };
                prop_assert_eq!((info.id.place, info.packed), (place, page.by.is_some()));
                let want = read(setup, model, l, h, page);
                prop_assert_eq!(tokens, &want, "layer {} head {} {:?}", l, h, info);
            }
            let first = if model.len() == 0 { 0 } else { model.kept / PAGE };
            for tile in first..model.len().div_ceil(PAGE) {
                let Some((info, tokens)) = got.next() else { panic!("tiles are missing") };
                prop_assert_eq!((info.id.place, info.id.ordinal), (Place::Ring, tile));
                let positions = (tile * PAGE..model.len().min((tile + 1) * PAGE)).collect();
                let page = Page { positions, ..Page::default() };
                prop_assert_eq!(tokens, &read(setup, model, l, h, &page));
            }
        }
    }
    prop_assert!(got.next().is_none());
    Ok(())
}

fn read(
    setup: &Setup,
    model: &Model,
    layer: usize,
    head: usize,
    page: &Page,
) -> Vec<(u32, Vec<u32>, Vec<u32>)> {
    let packed = page.by.map(|_| model.decoded(setup, head, page, model.filed));
    let row = |(t, at): (usize, &u32)| {
        let id = model.ids[*at as usize];
        let (k, v) = match packed {
            Some(decoded) => decoded.read[t].clone(),
            None => (key(setup, layer, id, head), value(setup, layer, id, head)),
        };
        (*at, bits(&k), bits(&v))
    };
    page.positions.iter().enumerate().map(row).collect()
}

fn history(setup: &Setup, ops: &[Op]) -> Result<(), TestCaseError> {
    let cache = setup.cache();
    let fresh = || Live(cache.sequence(), (0..setup.layers).map(|l| Model::new(setup, l)).collect());
    let mut live = vec![fresh()];
    let mut nonce = 0u64;
    for op in ops {
        match op {
            Op::New if live.len() < 4 => live.push(fresh()),
            Op::Step(parts, abort) => step(setup, &cache, &mut live, parts, *abort, &mut nonce)?,
            Op::Rollback(s, n) => {
                let s = s % live.len();
                let Live(sequence, models) = &mut live[s];
                let limit = sequence.rollback_limit();
                if *n > limit {
                    prop_assert_eq!(sequence.rollback(*n), Err(Error::RollbackTooFar { asked: *n, limit }));
                } else {
                    sequence.rollback(*n).unwrap();
                    models.iter_mut().for_each(|model| model.rollback(setup, *n));
                }
            }
            Op::Fork(s) if live.len() < 4 => {
                let (s, usage) = (s % live.len(), cache.usage());
                let fork = Live(live[s].0.fork(), live[s].1.clone());
                live.push(fork);
                prop_assert_eq!(cache.usage(), usage);
            }
            Op::Drop(s) if live.len() > 1 => {
                let s = s % live.len();
                live.swap_remove(s);
            }
            Op::Evict(s, pick) => {
                let s = s % live.len();
                let Live(sequence, models) = &mut live[s];
                let (l, h) = (*pick as usize % setup.layers, (*pick as usize >> 4) % 2);
                let all: Vec<_> =
                    sequence.pages(l, h).unwrap().filter(|page| page.id.place != Place::Ring).collect();
                if let Some(page) = (!all.is_empty()).then(|| all[(*pick as usize >> 8) % all.len()]) {
                    sequence.evict(l, h, page.id).unwrap();
                    let run = if let Place::Run(e) = page.id.place { usize::from(e) + 1 } else { 0 };
                    let same = |own: &&mut Page| own.held() && own.positions[0] == page.first.0;
                    models[l].runs[h][run].iter_mut().find(same).unwrap().gone = true;
                }
            }
            _ => {}
        }
        for live in &live {
            check(setup, &cache, live)?;
        }
        if live.len() == 1 {
            prop_assert_eq!(cache.usage().taken, live[0].0.bytes());
        }
    }
    drop(live);
    prop_assert_eq!(cache.usage().taken, 0);
    Ok(())
}

fn step(
    setup: &Setup,
    cache: &Cache,
    live: &mut [Live],
    parts: &[(usize, u32)],
    abort: Option<usize>,
    nonce: &mut u64,
) -> Result<(), TestCaseError> {
    let (mut chosen, count) = (vec![], live.len());
    for (s, n) in parts {
        if chosen.iter().all(|(other, _)| *other != s % count) {
            // No longer than the ring: tokens that pass through it in one step are read in another order.
            chosen.push((s % count, (*n).min(setup.ring)));
        }
    }
    chosen.sort_unstable();
    let ids: Vec<Vec<u64>> = chosen
        .iter()
        .map(|(_, n)| {
            *nonce += 1;
            (0..u64::from(*n)).map(|i| mix(&[*nonce, i])).collect()
        })
        .collect();
    let (usage, shared) = (cache.usage(), count > 1);
    let options = options(setup);
    let all: Vec<u64> = ids.concat();
    let mut got = vec![];
    {
        let parts = live.iter_mut().enumerate().filter_map(|(i, live)| {
            let (_, n) = chosen.iter().find(|(s, _)| *s == i)?;
            Some((&mut live.0, *n))
        });
        let mut step = match cache.begin(parts) {
            Ok(step) => step,
            Err(Error::OutOfBudget { needed, available }) => {
                prop_assert!(needed > available && available == usage.budget - usage.taken);
                prop_assert_eq!(cache.usage(), usage);
                return Ok(());
            }
            Err(other) => panic!("{other}"),
        };
        for l in 0..abort.unwrap_or(setup.layers) {
            got.push(fill(setup, &mut step, l, &all, &options, nonce.is_multiple_of(4)).unwrap());
        }
        if abort.is_none() {
            step.commit().unwrap();
        }
    }
    if abort.is_some() {
        if !shared {
            prop_assert_eq!(cache.usage(), usage);
        }
        return Ok(());
    }
    let v_dim = setup.layer.layout.v_dim as usize;
    let heads = setup.layer.query_heads as usize;
    let mut row = 0;
    for ((s, n), ids) in chosen.iter().zip(&ids) {
        for (model, got) in live[*s].1.iter_mut().zip(&got) {
            model.push(setup, ids);
            model.check(setup, *n, &options, &got.out[row * heads * v_dim..], &got.lse[row * heads..], 13);
        }
        row += *n as usize;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 400, ..pikv_test::cases(200, 600) })]
    #[test]
    fn random_histories(setup in setup(), ops in proptest::collection::vec(op(), 1..=28)) {
        history(&setup, &ops)?;
    }
}
