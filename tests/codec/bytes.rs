//! Bytes of sequences of packed pages, and errors where they exceed the budget.

use crate::model::Model;
use crate::setup::{Setup, codec, feed, shape, snapshot};
use pikv::codec::{Code, Codec, Coding, Packed};
use pikv::shape::Filed;
use pikv::{Cache, Dtype, Error, Sequence};

/// Bytes of a sequence equal the planner's forecast after every token, also while originals are kept, and never exceed the stated maximum.
#[test]
fn bytes_are_the_planners() {
    let layers = [shape(2, 1, 64, 64, Dtype::Bf16), shape(1, 1, 3, 200, Dtype::F32)];
    for (layer, rollback, experts, sinks) in [(0, 0, 1, 0), (0, 50, 4, 5), (1, 9, 3, 40), (1, 100, 7, 0)] {
        let setup = Setup {
            rollback,
            experts,
            sinks,
            codecs: vec![Some(codec(Code::Int4, Code::Int8)), None],
            ..Setup::new(layers[layer], 33, codec(Code::Int4, Code::Int4))
        };
        let cache = setup.cache();
        let (mut sequence, mut model) = (cache.sequence(), Model::new(&setup, 0));
        let mut kept = 0;
        for p in 0..400u32 {
            feed(&setup, &cache, &mut sequence, [u64::from(p)]);
            model.push(&setup, &[u64::from(p)]);
            let filed: Vec<Filed> = model.runs[0][1..]
                .iter()
                .map(|run| {
                    let all: Vec<u32> = run.iter().flat_map(|page| page.positions.clone()).collect();
                    let recent = all.iter().filter(|at| **at >= model.kept).count() as u32;
                    Filed::from(all.len() as u32).recent(recent)
                })
                .collect();
            let bytes = sequence.bytes();
            assert_eq!(bytes, cache.bytes_at(0, p + 1, &filed).unwrap(), "{} tokens", p + 1);
            assert_eq!(bytes, model.bytes(&setup));
            assert_eq!(bytes, cache.usage().taken);
            assert!(bytes <= cache.bytes_at_most(0, p + 1).unwrap(), "{} tokens", p + 1);
            let page = |page: pikv::report::PageInfo| page.packed && page.bytes > setup.packed_bytes(0);
            kept += sequence.pages(0, 0).unwrap().filter(|p| page(*p)).count();
        }
        assert_eq!(kept > 0, rollback > 0, "originals are kept for rollback, and for nothing else");
    }
}

#[test]
fn no_full_copy_is_kept() {
    let setup = Setup {
        rollback: 8,
        ..Setup::new(shape(1, 1, 128, 128, Dtype::Bf16), 64, codec(Code::Int4, Code::Int4))
    };
    let cache = setup.cache();
    let mut sequence = cache.sequence();
    let total = 8064u32;
    let steps = (0..u64::from(total / 64)).map(|i| i * 64..(i + 1) * 64);
    steps.for_each(|ids| drop(feed(&setup, &cache, &mut sequence, ids)));
    // 8000 tokens left the ring: 250 pages of 64 channel rows of 4 bits, scales and positions; one of them with its original,
    // and the tiles of 72 tokens.
    let packed = 2 * (32 * 128 / 2) + 128 * 4 + 32 * 4 * 4 + 64;
    let full = 2 * 32 * 128 * 2 + 128;
    assert_eq!(sequence.bytes(), 250 * packed + (1 + 3) * full);
    assert!(3.0 * (sequence.bytes() as f64) < f64::from(total) * 512.0);
}

/// A step that needs one byte more than is free changes nothing; with that byte it packs its pages.
#[test]
fn out_of_budget_before_anything_is_packed() {
    let base = Setup {
        layers: 2,
        experts: 3,
        codecs: vec![Some(codec(Code::Int4, Code::Int8)), Some(codec(Code::E5m2, Code::F16))],
        ..Setup::new(shape(2, 2, 20, 33, Dtype::F16), 40, codec(Code::Int4, Code::Int4))
    };
    let packed = |sequence: &Sequence| sequence.pages(0, 0).unwrap().filter(|page| page.packed).count();
    for (len, n) in [(100u32, 40u32), (111, 33), (150, 40), (133, 90)] {
        let history = |setup: &Setup, cache: &Cache| {
            let mut sequence = cache.sequence();
            (0..len).for_each(|p| drop(feed(setup, cache, &mut sequence, [u64::from(p)])));
            sequence
        };
        // Bytes that the step reserves.
        let cache = base.cache();
        let mut sequence = history(&base, &cache);
        let (taken, before) = (cache.usage().taken, packed(&sequence));
        let next: Vec<u64> = (0..u64::from(n)).map(|i| 900 + i).collect();
        let step = cache.begin([(&mut sequence, n)]).unwrap();
        let needed = cache.usage().taken - taken;
        drop(step);
        assert_eq!(cache.usage().taken, taken);
        feed(&base, &cache, &mut sequence, next.clone());
        let after = snapshot(&base, &sequence);
        assert!(packed(&sequence) > before, "{len} + {n} packs nothing");
        for missing in [0, 1] {
            let setup = Setup { budget: taken + needed - missing, ..base.clone() };
            let cache = setup.cache();
            let mut sequence = history(&setup, &cache);
            let old = (snapshot(&setup, &sequence), cache.usage());
            if missing == 0 {
                feed(&setup, &cache, &mut sequence, next.clone());
                assert_eq!(snapshot(&setup, &sequence), after);
                continue;
            }
            let error = cache.begin([(&mut sequence, n)]).unwrap_err();
            assert_eq!(error, Error::OutOfBudget { needed, available: needed - 1 });
            assert_eq!((snapshot(&setup, &sequence), cache.usage()), old);
            // In pieces it fits.
            next.chunks(5).for_each(|ids| drop(feed(&setup, &cache, &mut sequence, ids.to_vec())));
            assert_eq!(snapshot(&setup, &sequence), after);
        }
    }
}

/// A page is stored in one form: means, coefficients, or, once it is old, the form of the second codec. Forks share it.
#[test]
fn factors_and_old_pages_are_all_that_is_held() {
    let full = 2 * 32 * 128 * 2 + 128;
    let means = Coding::means(Code::Bf16, 2).unwrap();
    let pca = Coding::block_pca(Code::Int8, 7).unwrap();
    // 8 means of 128 channels; 2 rows of codes with a row of scales for 7 coefficients, and 8 vectors, of K; the same of V, whose
    // coefficients take 8 rows of 8 words.
    let (means_bytes, pca_bytes) =
        (2 * 8 * 128 * 2 + 64, (2 + 1 + 16) * 128 + (8 * 8 + 32 + 8 * 64) * 4 + 64);
    let (int8, int4) = (codec(Code::Int8, Code::Int8), codec(Code::Int4, Code::Int4));
    let packed = |codec: &Codec| codec.packed(128, 128).bytes();
    // 8000 tokens leave the ring: 250 pages, packed again when their last token is more than 1024 behind.
    let cases = [
        (Codec::new(means.clone(), means), None, 250 * means_bytes),
        (Codec::new(pca.clone(), pca), None, 250 * pca_bytes),
        (int8.clone(), Some((1024, int4.clone())), 218 * packed(&int4) + 32 * packed(&int8)),
    ];
    for (codec, age, bytes) in cases {
        let setup = Setup { age, ..Setup::new(shape(1, 1, 128, 128, Dtype::Bf16), 64, codec) };
        let cache = setup.cache();
        let mut sequence = cache.sequence();
        let steps = (0..126).map(|i| i * 64..(i + 1) * 64);
        steps.for_each(|ids| drop(feed(&setup, &cache, &mut sequence, ids)));
        assert_eq!(sequence.bytes(), bytes + 2 * full);
        let mut fork = sequence.fork();
        feed(&setup, &cache, &mut fork, 0..64);
        // The fork's own ring, and two more pages of any age.
        let more = cache.usage().taken - sequence.bytes();
        assert!(more <= 2 * full + 4 * packed(setup.codec(0).unwrap()), "{more}");
        assert_eq!(
            fork.pages(0, 0).unwrap().filter(|page| page.packed && page.shared).count() as u64,
            250 - if setup.age.is_some() { 2 } else { 0 }
        );
    }
}

/// Codes of few bits take the bits that they name, their scales, and 64 bytes of positions.
#[test]
fn bytes_of_few_bits() {
    let bits = [(Code::Int2, 2), (Code::Int3, 3), (Code::Int4, 4), (Code::Int5, 5), (Code::Int6, 6)];
    for (code, bits) in bits {
        for dim in [32u32, 64, 128, 256] {
            // A word for 32 numbers, beside their codes.
            let side = u64::from(32 * dim * (bits + 1) / 8);
            assert_eq!(codec(code, code).packed(dim, dim).bytes(), 2 * side + 64, "{} {dim}", code.name());
        }
    }
    for dim in [32u32, 64, 128, 256] {
        // A byte for 32 numbers; for 16, and 32 bytes for the scale of all.
        let (mx, nv) = (32 * dim / 2 + dim, 32 * dim / 2 + 2 * dim + 32);
        let page = codec(Code::Mxfp4, Code::Nvfp4).packed(dim, dim);
        assert_eq!(page.bytes(), u64::from(mx + nv) + 64, "{dim}");
        // With factors, fewer channels.
        let pca = Coding::block_pca(Code::Mxfp4, 7).unwrap();
        let Packed { k_dim, v_dim, k, v, .. } = Codec::new(pca.clone(), pca).packed(dim, dim);
        assert_eq!(Packed::new(k_dim, v_dim, k, v).acc_rows(), 1);
    }
    // Widths that are no multiple of 32 are padded: of 5 bits, K's 33 channels to 40 and to 64.
    let page = codec(Code::Int5, Code::Int5).packed(33, 33);
    let (k, v) = (2 * 128 + 5 * 128 + 2 * 128, 2 * 128 + 5 * 40 * 4);
    assert_eq!(page.bytes(), k + v + 64);
}
