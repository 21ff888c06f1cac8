//! A sequence saved on one back end continues on the other with the same bits.

use crate::standin::Standin;
use crate::suite::{config, shape};
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::{Attend, AttendOutput, Backend, Cache, CacheConfig, Dtype, Sequence};
use pikv_test::numbers::{bits, noise};

/// Adds `n` tokens in one step; returns the bits of attention.
fn feed(cache: &Cache, sequence: &mut Sequence, n: u32) -> Vec<u32> {
    let (at, n) = (u64::from(sequence.next_position().0), n as usize);
    let mut step = cache.begin([(&mut *sequence, n as u32)]).unwrap();
    let mut all = Vec::new();
    for layer in 0..cache.config().layers.len() {
        let seed = at * 16 + layer as u64 * 4;
        step.append(layer, &noise(seed, n * 16), &noise(seed + 1, n * 16)).unwrap();
        let (mut out, mut lse) = (vec![0.0; n * 32], vec![0.0; n * 4]);
        let q = noise(seed + 2, n * 32);
        step.attend(layer, &q, &Attend::new(0.4), AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        let experts: Vec<u16> = (0..n as u64).map(|i| ((i + seed) % 3 % 2) as u16).collect();
        step.route(layer, &experts).unwrap();
        all.extend(bits(&[out, lse].concat()));
    }
    step.commit().unwrap();
    all
}

fn configs() -> Vec<CacheConfig> {
    let plain = || config(vec![shape(2, 2, 8, 8, Dtype::Bf16, Dtype::F32); 2], 8, 4).experts(2, 1);
    let int8 = Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int4));
    vec![
        plain(),
        plain().compress(int8),
        plain().key_bounds(true).evict(Eviction::new(H2o, Budget::Tokens(60)).batch(4)),
    ]
}

#[test]
fn a_sequence_goes_from_one_back_end_to_the_other() {
    let standin = Standin::new();
    for (i, config) in configs().into_iter().enumerate() {
        let on = |backend: Backend| Cache::new(config.clone().backend(backend)).unwrap();
        let (plain, caches) = (on(Backend::CPU), [on(Backend::CPU), on(standin.backend())]);
        let (mut stays, mut goes) = (plain.sequence(), caches[0].sequence());
        let mut files = [Vec::new(), Vec::new()];
        for turn in 0..6 {
            let cache = &caches[turn % 2];
            for n in [9, 1, 4] {
                let n = if turn == 0 { 4 * n } else { n };
                assert_eq!(feed(&plain, &mut stays, n), feed(cache, &mut goes, n), "{i}, turn {turn}");
            }
            assert_eq!((stays.rollback(3), goes.rollback(3)), (Ok(()), Ok(())));
            for (sequence, file) in [&stays, &goes].into_iter().zip(&mut files) {
                file.clear();
                sequence.save(b"", file).unwrap();
            }
            assert!(files[0] == files[1], "{i}, turn {turn}: both back ends write the same bytes");
            goes = caches[1 - turn % 2].restore(&mut &files[1][..]).unwrap().sequence;
        }
        drop(goes);
        assert!(caches.iter().all(|cache| cache.usage().taken == 0));
    }
}
