//! Pages that are packed early, because their tokens would span more positions than 16 bits can express.

use crate::model::Model;
use crate::setup::{Setup, bits, codec, fill, options, shape, snapshot};
use pikv::codec::Code;
use pikv::report::{PageInfo, Place};
use pikv::{AttendOutput, Cache, Dtype, Position, Rows, Sequence};

const SPAN: u32 = 65_536;

/// One channel, two experts; the second is cold. Cheap enough for a hundred thousand tokens.
fn setup(window: Option<u32>, rollback: u32) -> Setup {
    let mut layer = shape(1, 1, 1, 1, Dtype::F32);
    layer.window = window;
    Setup { experts: 2, rollback, ..Setup::new(layer, 8, codec(Code::Int8, Code::Int4)) }
}

/// An id of a token with home expert `expert`.
fn id(setup: &Setup, salt: u32, expert: u16) -> u64 {
    (0..).map(|i| u64::from(salt) << 16 | i).find(|id| setup.home(0, *id) == expert).unwrap()
}

/// Appends without attention, and evicts the hot expert's packed pages, except the last ones.
fn skim(setup: &Setup, cache: &Cache, sequence: &mut Sequence, ids: &[u64]) {
    for ids in ids.chunks(4096) {
        let v: Vec<f32> = ids.iter().flat_map(|id| crate::setup::value(setup, 0, *id, 0)).collect();
        let k: Vec<f32> = ids.iter().flat_map(|id| crate::setup::key(setup, 0, *id, 0)).collect();
        let homes: Vec<u16> = ids.iter().map(|id| setup.home(0, *id)).collect();
        let mut step = cache.begin([(&mut *sequence, ids.len() as u32)]).unwrap();
        step.append(0, &k, &v).unwrap();
        step.route(0, &homes).unwrap();
        step.commit().unwrap();
    }
}

/// Sequence and model with five tokens of the cold expert at 3.., then hot ones up to `len`.
fn cold(setup: &Setup, cache: &Cache, len: u32) -> (Sequence, Model) {
    let ids: Vec<u64> = (0..len).map(|p| id(setup, p, u16::from((3..8).contains(&p)))).collect();
    let (mut sequence, mut model) = (cache.sequence(), Model::new(setup, 0));
    skim(setup, cache, &mut sequence, &ids);
    model.push(setup, &ids);
    (sequence, model)
}

fn pages(sequence: &Sequence) -> Vec<PageInfo> {
    sequence.pages(0, 0).unwrap().filter(|page| page.id.place == Place::Run(1)).collect()
}

#[track_caller]
fn agree(setup: &Setup, sequence: &Sequence, model: &Model) {
    let want: Vec<_> = model.runs[0][2].iter().enumerate().filter(|(_, page)| page.held()).collect();
    let got = pages(sequence);
    assert_eq!(got.len(), want.len(), "{got:?}, want {want:?}");
    for (page, (ordinal, want)) in got.iter().zip(want) {
        let positions: Vec<u32> = sequence.positions(0, 0, page.id).unwrap().map(|(_, p)| p.0).collect();
        assert_eq!((page.id.ordinal as usize, page.packed), (ordinal, want.by.is_some()));
        assert_eq!(positions, want.positions);
        assert_eq!((page.first.0, page.last.0), (positions[0], positions[positions.len() - 1]));
    }
    assert_eq!(sequence.bytes(), model.bytes(setup));
}

fn step(
    setup: &Setup,
    cache: &Cache,
    sequence: &mut Sequence,
    model: &mut Model,
    ids: &[u64],
) -> (Vec<u32>, Vec<u32>) {
    let options = options(setup);
    let mut step = cache.begin([(&mut *sequence, ids.len() as u32)]).unwrap();
    let got = fill(setup, &mut step, 0, ids, &options, true).unwrap();
    step.commit().unwrap();
    model.push(setup, ids);
    if setup.layer.window.is_some() {
        model.check(setup, ids.len() as u32, &options, &got.out, &got.lse, 1);
    }
    got.bits()
}

/// At the last position that fits, one more, and far more.
#[test]
fn packed_by_the_token_that_would_widen_it() {
    for (gap, early) in [(SPAN - 1, false), (SPAN, true), (SPAN + 40, true)] {
        let setup = setup(None, 12);
        let cache = setup.cache();
        let (mut sequence, mut model) = cold(&setup, &cache, 3 + gap);
        let (before, usage) = (snapshot(&setup, &sequence), cache.usage());
        assert_eq!(pages(&sequence)[0].tokens, 5);
        let cold = id(&setup, 999_999, 1);
        let hot: Vec<u64> = (0..8).map(|i| id(&setup, 1_000_000 + i, 0)).collect();
        step(&setup, &cache, &mut sequence, &mut model, &[cold]);
        // Still in the ring.
        assert!(!pages(&sequence)[0].packed);
        let all = step(&setup, &cache, &mut sequence, &mut model, &hot);
        assert_eq!(pages(&sequence)[0].packed, early);
        agree(&setup, &sequence, &model);
        // Rows of that step and its like asked again: before the page was packed, and after.
        let q: Vec<f32> = hot.iter().flat_map(|id| crate::setup::query(&setup, 0, *id)).collect();
        let (mut out, mut lse) = (vec![f32::NAN; 8], vec![f32::NAN; 8]);
        let rows = [Rows::new(&sequence, Position(4 + gap), 8)];
        cache.attend(0, &rows, &q, &options(&setup), AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        assert_eq!((bits(&out), bits(&lse)), all);
        model.check(&setup, 8, &options(&setup), &out, &lse, 4);
        // Taken back, it is open again, and takes the next token if that is near enough.
        sequence.rollback(9).unwrap();
        model.rollback(&setup, 9);
        agree(&setup, &sequence, &model);
        assert_eq!(cache.usage().taken, sequence.bytes());
        let forget = |pages: &[crate::setup::Stored]| -> Vec<_> {
            pages.iter().filter(|page| page.0.id.place == Place::Run(1)).cloned().collect()
        };
        assert_eq!(forget(&before), forget(&snapshot(&setup, &sequence)));
        assert!(usage.taken >= sequence.bytes());
        // 32 more of the cold expert.
        let many: Vec<u64> = (0..45).map(|i| id(&setup, 2_000_000 + i, 1)).collect();
        many.chunks(5).for_each(|ids| drop(step(&setup, &cache, &mut sequence, &mut model, ids)));
        agree(&setup, &sequence, &model);
        drop(sequence);
        assert_eq!(cache.usage().taken, 0);
    }
}

/// A page that left the window is kept while the token that packed it early can be rolled back.
#[test]
fn early_packing_behind_a_window() {
    let setup = setup(Some(50), 12);
    let cache = setup.cache();
    // Positions 3.. are cold; the token at 3 + SPAN would widen the page, one 5 before it would not.
    let (mut sequence, mut model) = cold(&setup, &cache, SPAN - 5);
    let mut never = (sequence.fork(), model.clone());
    let ids: Vec<u64> =
        (0..8).map(|i| id(&setup, 3_000_000 + i, 0)).chain([id(&setup, 999_999, 1)]).collect();
    for id in &ids[..8] {
        step(&setup, &cache, &mut sequence, &mut model, &[*id]);
    }
    step(&setup, &cache, &mut sequence, &mut model, &[ids[8]]);
    for i in 0..8 {
        step(&setup, &cache, &mut sequence, &mut model, &[id(&setup, 4_000_000 + i, 0)]);
    }
    agree(&setup, &sequence, &model);
    sequence.rollback(12).unwrap();
    model.rollback(&setup, 12);
    agree(&setup, &sequence, &model);
    for id in &ids[..5] {
        step(&setup, &cache, &mut never.0, &mut never.1, &[*id]);
    }
    // A cold token that still fits.
    for i in 0..40 {
        let next = id(&setup, 5_000_000 + i, u16::from(i % 9 == 0));
        let a = step(&setup, &cache, &mut sequence, &mut model, &[next]);
        let b = step(&setup, &cache, &mut never.0, &mut never.1, &[next]);
        assert_eq!(a, b, "token {i}");
        agree(&setup, &never.0, &never.1);
        let of = |s: &Sequence| {
            pages(s).iter().map(|page| (page.id, page.tokens, page.first, page.last)).collect::<Vec<_>>()
        };
        assert_eq!(of(&sequence), of(&never.0));
    }
}

/// One step in which an expert goes cold more than once.
#[test]
fn early_packing_within_a_step() {
    let setup = setup(None, 0);
    let cache = setup.cache();
    let ids: Vec<u64> = (0..2 * SPAN + 600).map(|p| id(&setup, p, u16::from(p % SPAN == 5))).collect();
    let (mut sequence, mut model) = (cache.sequence(), Model::new(&setup, 0));
    let all = |row: fn(&Setup, usize, u64, usize) -> Vec<f32>| -> Vec<f32> {
        ids.iter().flat_map(|id| row(&setup, 0, *id, 0)).collect()
    };
    let homes: Vec<u16> = ids.iter().map(|id| setup.home(0, *id)).collect();
    let mut step = cache.begin([(&mut sequence, ids.len() as u32)]).unwrap();
    step.append(0, &all(crate::setup::key), &all(crate::setup::value)).unwrap();
    step.route(0, &homes).unwrap();
    step.commit().unwrap();
    model.push(&setup, &ids);
    assert_eq!(pages(&sequence).iter().filter(|page| page.packed && page.tokens == 1).count(), 2);
    agree(&setup, &sequence, &model);
    assert!(sequence.bytes() <= cache.bytes_at_most(0, model.len()).unwrap());
}
