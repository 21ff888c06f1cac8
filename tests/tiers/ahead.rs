//! Prefetch runs in parallel with attention.

use crate::setup::{Control, PAGE_BYTES, append, attend, bytes, config, fake, feed};
use pikv::tiers::{Fetches, Tiers};
use pikv::{Attend, Cache, Error, Sequence};
use pikv_test::numbers::bits;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// Layers of a cache with as many pages as possible in a store.
fn away(layers: usize, staging: u64) -> (Arc<Control>, Cache, Sequence) {
    let control = Arc::new(Control::default());
    let tiers = fake(Tiers::new().staging(staging), 1 << 20, &control);
    let cache = Cache::new(config(layers, 1 << 20).tiers(tiers)).unwrap();
    let mut sequence = cache.sequence();
    (0..13).for_each(|i| drop(feed(&cache, &mut sequence, 8, i).unwrap()));
    assert_eq!(sequence.demote(u64::MAX), Ok(layers as u64 * 6 * PAGE_BYTES));
    (control, cache, sequence)
}

/// A layer is attended from its first block to its last while a read for the next one is in progress: the read is blocked until attention
/// ends.
#[test]
fn a_layer_is_attended_while_the_next_one_is_read() {
    let (control, cache, mut sequence) = away(3, 1 << 20);
    let other = Cache::new(config(3, 1 << 20)).unwrap();
    let mut plain = other.sequence();
    (0..13).for_each(|i| drop(feed(&other, &mut plain, 8, i).unwrap()));
    let want = feed(&other, &mut plain, 1, 50).unwrap();

    // The first layer is asked for by `begin` where the step before read all.
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    control.until(|control| control.early.load(SeqCst) == 6);
    let mut seen = cache.fetches();
    seen.ahead = 6;
    control.shut(true);
    append(&mut step, 0, 1, 50);
    let out = attend(&mut step, 0, 1, 50, &Attend::new(1.0)).unwrap();
    assert_eq!(bits(&out), bits(&want[0]));
    assert_eq!(cache.fetches(), seen);
    // In progress, or about to start: nothing of it was read before attention ended.
    control.until(|control| control.waiting.load(SeqCst) == 1);
    assert_eq!(control.early.load(SeqCst), 6);
    control.shut(false);
    // All pages are prefetched before the request.
    control.until(|control| control.early.load(SeqCst) == 12);
    append(&mut step, 1, 1, 50);
    let out = attend(&mut step, 1, 1, 50, &Attend::new(1.0)).unwrap();
    assert_eq!(bits(&out), bits(&want[1]));
    seen.ahead += 6;
    assert_eq!(cache.fetches(), seen);
    control.until(|control| control.early.load(SeqCst) == 18);
    let read = control.read.load(SeqCst);
    append(&mut step, 2, 1, 50);
    let out = attend(&mut step, 2, 1, 50, &Attend::new(1.0)).unwrap();
    assert_eq!(bits(&out), bits(&want[2]));
    assert_eq!(control.read.load(SeqCst), read);
    step.commit().unwrap();
    drop(sequence);
    assert_eq!(bytes(&cache), [0, 0]);
}

/// A caller that comes early does not wait for pages that the thread has not begun to read.
#[test]
fn who_comes_early_reads_for_itself() {
    let (control, cache, mut sequence) = away(2, 1 << 20);
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    control.until(|control| control.early.load(SeqCst) == 6);
    control.shut(true);
    append(&mut step, 0, 1, 50);
    attend(&mut step, 0, 1, 50, &Attend::new(1.0)).unwrap();
    control.until(|control| control.waiting.load(SeqCst) == 1);
    append(&mut step, 1, 1, 50);
    let before = cache.fetches();
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| attend(&mut step, 1, 1, 50, &Attend::new(1.0)).map(|_| ()));
        // Five pages by the caller, then it waits for the sixth.
        control.until(|control| control.read.load(SeqCst) - control.early.load(SeqCst) == 5);
        control.shut(false);
        caller.join().unwrap().unwrap();
    });
    let after = cache.fetches();
    assert_eq!((after.awaited - before.awaited, after.late - before.late), (1, 5));
    step.commit().unwrap();
}

/// The staging area bounds the prefetch, and the pages of one call.
#[test]
fn staging_is_bounded() {
    // A layer and half of the next.
    let (control, cache, mut sequence) = away(2, 9 * PAGE_BYTES);
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    control.until(|control| control.early.load(SeqCst) == 6);
    for layer in 0..2 {
        append(&mut step, layer, 1, 50);
    }
    attend(&mut step, 0, 1, 50, &Attend::new(1.0)).unwrap();
    control.until(|control| control.early.load(SeqCst) == 9);
    attend(&mut step, 1, 1, 50, &Attend::new(1.0)).unwrap();
    let Fetches { in_place, ahead, awaited, late, .. } = cache.fetches();
    assert_eq!((in_place, ahead, awaited, late), (0, 9, 0, 3));
    drop(step);

    let (_, cache, mut sequence) = away(2, 6 * PAGE_BYTES - 1);
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    append(&mut step, 0, 1, 50);
    let refused = attend(&mut step, 0, 1, 50, &Attend::new(1.0)).unwrap_err();
    let (needed, staging) = (6 * PAGE_BYTES, 6 * PAGE_BYTES - 1);
    assert_eq!(refused, Error::Staging { layer: 0, needed, staging });
    drop(step);
    // As the message suggests; the newest page of each head, those of the second layer first.
    sequence.promote(3 * PAGE_BYTES).unwrap();
    feed(&cache, &mut sequence, 1, 50).unwrap();
}

/// Dropped steps leave nothing behind, at any point.
#[test]
fn a_step_that_is_dropped_lets_go_of_all() {
    let (control, cache, mut sequence) = away(2, 1 << 20);
    for layers in 0..3 {
        for _ in 0..20 {
            let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
            // First after at least one page was read; later at any point.
            control.until(|control| control.early.load(SeqCst) > 0);
            for layer in 0..layers {
                append(&mut step, layer, 1, 50);
                attend(&mut step, layer, 1, 50, &Attend::new(1.0)).unwrap();
            }
            drop(step);
            assert!(sequence.pages(0, 0).unwrap().all(|page| !page.shared));
        }
    }
    drop(sequence);
    assert_eq!(bytes(&cache), [0, 0]);
}
