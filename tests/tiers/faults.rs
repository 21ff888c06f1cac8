//! Stores that fail.

use crate::setup::{Control, PAGE_BYTES, append, attend, bytes, config, fake, feed};
use pikv::policy::{Budget, Candidates, Eviction, KeyNorm, Policy};
use pikv::tiers::{PageStore, TierOperation, Tiers};
use pikv::{Attend, Cache, Error, Sequence, StepReport};
use pikv_test::numbers::bits;
use std::fs::File;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

fn failed(operation: TierOperation, kind: ErrorKind) -> Error {
    Error::Tier { operation, tier: "fake".into(), bytes: PAGE_BYTES, kind }
}

/// Every key and value of a sequence, by page.
fn rows(sequence: &Sequence) -> Vec<(usize, usize, u32, Vec<u32>)> {
    let mut all = Vec::new();
    for (layer, head) in [(0, 0), (0, 1)] {
        for page in sequence.pages(layer, head).unwrap().collect::<Vec<_>>() {
            for (lane, position) in sequence.positions(layer, head, page.id).unwrap().collect::<Vec<_>>() {
                let (mut k, mut v) = ([0.0; 4], [0.0; 4]);
                assert_eq!(sequence.read(layer, head, page.id, lane, &mut k, &mut v), Ok(position));
                all.push((layer, head, position.0, bits(&[k, v].concat())));
            }
        }
    }
    all
}

fn setup(host: u64) -> (Arc<Control>, Cache, Sequence) {
    let control = Arc::new(Control::default());
    let tiers = fake(if host > 0 { Tiers::new().host(host) } else { Tiers::new() }, 1 << 20, &control);
    let cache = Cache::new(config(1, 24 * PAGE_BYTES).tiers(tiers)).unwrap();
    let mut sequence = cache.sequence();
    (0..17).for_each(|i| drop(feed(&cache, &mut sequence, 8, i).unwrap()));
    (control, cache, sequence)
}

#[test]
fn a_full_disk_leaves_pages_where_they_were() {
    let (control, cache, mut sequence) = setup(0);
    let before = rows(&sequence);
    control.full.store(true, SeqCst);
    assert_eq!(sequence.demote(1), Err(failed(TierOperation::Write, ErrorKind::StorageFull)));
    assert_eq!(rows(&sequence), before);
    assert_eq!(bytes(&cache)[1], 0);
    // Steps work until the budget is full, and then return the reason.
    let mut n = 0;
    let refused = loop {
        match feed(&cache, &mut sequence, 8, 1000 + n) {
            Ok(_) => n += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, failed(TierOperation::Write, ErrorKind::StorageFull));
    assert!(n > 2);
    assert_eq!(rows(&sequence)[..32], before[..32]);
    control.full.store(false, SeqCst);
    feed(&cache, &mut sequence, 8, 1000 + n).unwrap();
    assert!(bytes(&cache)[1] > 0);
    assert_eq!(rows(&sequence)[..32], before[..32]);
}

#[test]
fn a_tier_that_fails_is_passed_over() {
    let (control, cache, mut sequence) = setup(2 * PAGE_BYTES);
    control.full.store(true, SeqCst);
    assert_eq!(sequence.demote(2 * PAGE_BYTES), Ok(2 * PAGE_BYTES));
    assert_eq!(sequence.demote(1), Err(failed(TierOperation::Write, ErrorKind::StorageFull)));
    assert_eq!(bytes(&cache)[1..], [2 * PAGE_BYTES, 0]);
    let full = Error::TierFull { tier: "host".into(), needed: PAGE_BYTES, available: 0 };
    assert_eq!(sequence.arrange(0..1, &[0.0, 1.0, 0.0]), Err(full));
}

/// The disk of the system that is always full.
#[test]
#[cfg(target_os = "linux")]
fn a_real_full_disk() {
    let open =
        || Ok(Box::new(File::options().read(true).write(true).open("/dev/full")?) as Box<dyn PageStore>);
    let cache = Cache::new(config(1, 1 << 20).tiers(Tiers::new().store("full", 1 << 20, open))).unwrap();
    let mut sequence = cache.sequence();
    (0..9).for_each(|i| drop(feed(&cache, &mut sequence, 8, i).unwrap()));
    let before = rows(&sequence);
    let (operation, tier, bytes) = (TierOperation::Write, "full".into(), PAGE_BYTES);
    let refused = sequence.demote(1).unwrap_err();
    assert_eq!(refused, Error::Tier { operation, tier, bytes, kind: ErrorKind::StorageFull });
    assert_eq!(refused.to_string(), "writing of 1664 bytes, tier full: no storage space");
    assert_eq!(rows(&sequence), before);
    assert_eq!(cache.usage().tiers[0].bytes, 0);
}

#[test]
fn a_page_that_cannot_be_read_fails_the_call_and_no_more() {
    let (control, cache, mut sequence) = setup(0);
    let before = rows(&sequence);
    let want = {
        let (_, cache, mut sequence) = setup(0);
        feed(&cache, &mut sequence, 1, 77).unwrap()
    };
    sequence.demote(4 * PAGE_BYTES).unwrap();
    for (flag, kind) in
        [(&control.unreadable, ErrorKind::UnexpectedEof), (&control.corrupt, ErrorKind::InvalidData)]
    {
        flag.store(true, SeqCst);
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        append(&mut step, 0, 1, 77);
        let fail = |step: &mut _| attend(step, 0, 1, 77, &Attend::new(1.0)).unwrap_err();
        assert_eq!(fail(&mut step), failed(TierOperation::Read, kind));
        assert_eq!(fail(&mut step), failed(TierOperation::Read, kind));
        flag.store(false, SeqCst);
        // In the same step, as if nothing had been.
        let out = attend(&mut step, 0, 1, 77, &Attend::new(1.0)).unwrap();
        assert_eq!(bits(&out), bits(&want[0]));
        drop(step);
        flag.store(true, SeqCst);
        assert_eq!(sequence.promote(1), Err(failed(TierOperation::Read, kind)));
        let page = sequence.pages(0, 0).unwrap().next().unwrap();
        let read = sequence.read(0, 0, page.id, 0, &mut [0.0; 4], &mut [0.0; 4]);
        assert_eq!(read, Err(failed(TierOperation::Read, kind)));
        flag.store(false, SeqCst);
        assert_eq!(rows(&sequence), before);
    }
}

/// The cache's thread survives a store that panics, and no caller waits without end.
#[test]
fn a_store_that_panics_on_the_way() {
    let (control, cache, mut sequence) = setup(0);
    sequence.demote(4 * PAGE_BYTES).unwrap();
    control.panics.store(true, SeqCst);
    control.shut(true);
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    control.until(|control| control.waiting.load(SeqCst) == 1);
    append(&mut step, 0, 1, 77);
    control.shut(false);
    control.until(|control| control.waiting.load(SeqCst) == 0);
    drop(step);
    control.panics.store(false, SeqCst);
    let read = control.early.load(SeqCst);
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    control.until(|control| control.early.load(SeqCst) == read + 4);
    append(&mut step, 0, 1, 77);
    attend(&mut step, 0, 1, 77, &Attend::new(1.0)).unwrap();
    assert_eq!(cache.fetches().ahead, 4);
    step.commit().unwrap();
}

/// Likes tokens with large first channels, which it looks up.
#[derive(Debug)]
struct Looks;

impl Policy for Looks {
    fn name(&self) -> &str {
        "looks"
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        let (mut k, mut v) = ([0.0; 4], [0.0; 4]);
        for (i, utility) in utility.iter_mut().enumerate() {
            tokens.read(i, &mut k, &mut v);
            *utility = k[0];
        }
    }
}

/// A policy that cannot read tokens evicts none, and continues once it can.
#[test]
fn a_ranking_that_cannot_read_evicts_nothing() {
    let control = Arc::new(Control::default());
    let base = || config(1, 1 << 20).evict(Eviction::new(Looks, Budget::Tokens(96)).by_page().batch(1));
    let cache = Cache::new(base().tiers(fake(Tiers::new(), 1 << 20, &control))).unwrap();
    let plain = Cache::new(base()).unwrap();
    let (mut sequence, mut other) = (cache.sequence(), plain.sequence());
    for i in 0..11 {
        feed(&cache, &mut sequence, 8, i).unwrap();
        feed(&plain, &mut other, 8, i).unwrap();
    }
    assert!(sequence.demote(u64::MAX).unwrap() > 0);
    let before = bytes(&cache);
    // Attention must not fail by it, so the step does without.
    control.unreadable.store(true, SeqCst);
    for i in 11..16 {
        let mut step = cache.begin([(&mut sequence, 8)]).unwrap();
        append(&mut step, 0, 8, i);
        step.commit().unwrap();
        feed(&plain, &mut other, 8, i).unwrap();
    }
    assert_eq!(sequence.resident(0, 0).unwrap().0, 128);
    assert_eq!(bytes(&cache)[1], before[1]);
    control.unreadable.store(false, SeqCst);
    feed(&cache, &mut sequence, 1, 16).unwrap();
    assert!(sequence.resident(0, 0).unwrap().0 <= 96);
}

/// Thinned pages are compacted in any tier, or stay unchanged while the tier fails.
#[test]
fn thinned_pages_wait_for_a_tier_that_fails() {
    let control = Arc::new(Control::default());
    let base = || config(1, 1 << 20).evict(Eviction::new(KeyNorm, Budget::Tokens(96)).batch(1));
    let cache = Cache::new(base().tiers(fake(Tiers::new(), 1 << 20, &control))).unwrap();
    let plain = Cache::new(base()).unwrap();
    let (mut sequence, mut other) = (cache.sequence(), plain.sequence());
    for i in 0..11 {
        feed(&cache, &mut sequence, 8, i).unwrap();
        feed(&plain, &mut other, 8, i).unwrap();
    }
    assert_eq!(sequence.demote(u64::MAX), Ok(4 * PAGE_BYTES));
    let pages = |sequence: &Sequence| sequence.pages(0, 0).unwrap().count();
    let mut waited = 0;
    for i in 11..40 {
        let mut outs = Vec::new();
        for (cache, sequence) in [(&cache, &mut sequence), (&plain, &mut other)] {
            let mut step = cache.begin([(sequence, 2)]).unwrap();
            append(&mut step, 0, 2, i);
            outs.push(attend(&mut step, 0, 2, i, &Attend::new(1.0)).unwrap());
            // While a step is committed pages are put together.
            control.unreadable.store(true, SeqCst);
            step.commit().unwrap();
            control.unreadable.store(false, SeqCst);
        }
        // In other places, so in another order.
        let near = |a: &f32, b: &f32| (a - b).abs() <= 1e-6;
        assert!(outs[0].iter().zip(&outs[1]).all(|(a, b)| near(a, b)));
        let all = |sequence: &Sequence| {
            let mut rows = rows(sequence);
            rows.sort();
            rows
        };
        assert_eq!(all(&sequence), all(&other));
        // Until the next step begins, which tries again.
        waited += u32::from(pages(&sequence) > pages(&other));
    }
    assert!(waited > 0);
    let mut report = StepReport::default();
    for i in 40..60 {
        let mut step = cache.begin([(&mut sequence, 2)]).unwrap();
        append(&mut step, 0, 2, i);
        attend(&mut step, 0, 2, i, &Attend::new(1.0)).unwrap();
        step.commit_with(&mut report).unwrap();
        feed(&plain, &mut other, 2, i).unwrap();
    }
    assert_eq!(pages(&sequence), pages(&other));
    assert!(bytes(&cache)[1] <= 2 * PAGE_BYTES * pages(&sequence) as u64);
}

#[test]
fn files_that_cannot_be_opened_and_files_without_a_name() {
    let refused =
        Cache::new(config(1, 1 << 20).tiers(Tiers::new().file("/nowhere/at/all", 4096))).unwrap_err();
    let (operation, tier, kind) =
        (TierOperation::Open, "file in /nowhere/at/all".into(), ErrorKind::NotFound);
    assert_eq!(refused, Error::Tier { operation, tier, bytes: 4096, kind });
    let dir = std::env::temp_dir().join(format!("pikv-tiers-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let cache = Cache::new(config(1, 1 << 20).tiers(Tiers::new().file(&dir, 1 << 20))).unwrap();
    let mut sequence = cache.sequence();
    (0..9).for_each(|i| drop(feed(&cache, &mut sequence, 8, i).unwrap()));
    let before = rows(&sequence);
    assert_eq!(sequence.demote(u64::MAX), Ok(4 * PAGE_BYTES));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    assert_eq!(rows(&sequence), before);
    std::fs::remove_dir(&dir).unwrap();
    feed(&cache, &mut sequence, 1, 9).unwrap();
}
