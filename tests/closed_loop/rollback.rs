//! Routers unlearn tokens that were rolled back: a loop with rejected drafts is compared with a twin that never had them.

use super::{EXPERTS, LAYERS, config, routers, rows, states, turn};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::rules::Hits;
use pikv::{Attend, AttendOutput, Cache, ClosedLoop, ReadPages, Sequence};
use pikv_test::numbers::Rng;
use pikv_test::scaled;

/// A loop whose cache can take 8 tokens back.
pub fn looped(id: usize) -> (Cache, ClosedLoop) {
    let evict = Eviction::new(H2o, Budget::Tokens(40)).batch(4);
    let hits = Hits::new().pages(2).every(1);
    let cache = Cache::new(config(2).rollback(8).hits(hits).evict(evict)).unwrap();
    (cache.clone(), ClosedLoop::new(cache, routers(id, 2)).unwrap())
}

/// One step of several sequences: rows of each, and the seed of its numbers.
pub fn together(pikv: &mut ClosedLoop, parts: Vec<(&mut Sequence, usize, u64)>) {
    let of: Vec<(usize, u64)> = parts.iter().map(|(_, n, seed)| (*n, *seed)).collect();
    let mut step = pikv.begin(parts.into_iter().map(|(s, n, _)| (s, n as u32))).unwrap();
    for layer in 0..LAYERS {
        let all = of.iter().map(|&(n, seed)| rows(seed, layer, n));
        let [k, v, q, logits] = all.fold([const { Vec::new() }; 4], |mut sum, own| {
            sum.iter_mut().zip(own).for_each(|(sum, own)| sum.extend(own));
            sum
        });
        let mut out = vec![0.0; q.len()];
        step.route(layer, &logits).unwrap();
        step.append(layer, &k, &v).unwrap();
        step.attend(layer, &q, &Attend::new(1.0), AttendOutput::new(&mut out)).unwrap();
    }
    step.commit().unwrap();
}

#[test]
fn rejected_drafts_were_never_routed() {
    let mut wanted = 0.0;
    for id in 0..7 {
        for seed in 0..scaled(3, 60) {
            let mut rng = Rng(seed);
            let ((cache, mut pikv), (other, mut twin)) = (looped(id), looped(id));
            let (mut a, mut b) = (cache.sequence(), other.sequence());
            // Long enough for pages to be known.
            let prompt = 1 + rng.below(400) as usize;
            turn(&mut pikv, &mut a, prompt, seed, ReadPages::Experts);
            turn(&mut twin, &mut b, prompt, seed, ReadPages::Experts);
            for i in 0..40 {
                let seed = 1000 * (seed + 1) + i;
                let mut drafts = rng.below(9);
                let count = drafts;
                while drafts > 0 {
                    let n = 1 + rng.below(drafts);
                    turn(&mut pikv, &mut a, n as usize, seed + 500, ReadPages::Experts);
                    drafts -= n;
                }
                a.rollback(count).unwrap();
                assert_eq!(
                    states(pikv.routers()),
                    states(twin.routers()),
                    "router {id}, {seed}, {count} drafts"
                );
                let x = turn(&mut pikv, &mut a, 1, seed, ReadPages::Experts);
                let y = turn(&mut twin, &mut b, 1, seed, ReadPages::Experts);
                assert_eq!(super::bits(&x), super::bits(&y), "router {id}, {seed}");
                for layer in 0..LAYERS {
                    let of = |pikv: &ClosedLoop| {
                        let report = pikv.report();
                        [report.hits(layer).to_vec(), report.misses(layer).to_vec()]
                    };
                    assert_eq!(of(&pikv), of(&twin), "router {id}, {seed}");
                    wanted += of(&pikv).iter().flatten().sum::<f64>();
                }
            }
        }
    }
    assert!(wanted > 0.0);
}

/// Some drafts of a step stay. Routers learn the misses that a step of those tokens alone would have had.
#[test]
fn of_drafts_that_stay_in_part_hits_count_row_by_row() {
    let ((cache, mut pikv), (other, mut twin)) = (looped(3), looped(3));
    let (mut a, mut b) = (cache.sequence(), other.sequence());
    for (pikv, sequence) in [(&mut pikv, &mut a), (&mut twin, &mut b)] {
        (0..3).for_each(|i| drop(turn(pikv, sequence, 100, i, ReadPages::All)));
    }
    let before = states(pikv.routers());
    for i in 10..40u64 {
        let (n, stay) = (6, 1 + i as usize % 6);
        let part = |pikv: &mut ClosedLoop, sequence: &mut Sequence, n: usize| {
            let mut step = pikv.begin([(sequence, n as u32)]).unwrap();
            for layer in 0..LAYERS {
                let [k, v, q, logits] = rows(i, layer, 6);
                step.route(layer, &logits[..n * EXPERTS]).unwrap();
                step.append(layer, &k[..n * 16], &v[..n * 16]).unwrap();
                let mut out = vec![0.0; n * 32];
                step.attend(layer, &q[..n * 32], &Attend::new(1.0), AttendOutput::new(&mut out)).unwrap();
            }
            step.commit().unwrap();
        };
        part(&mut pikv, &mut a, n);
        a.rollback((n - stay) as u32).unwrap();
        part(&mut twin, &mut b, stay);
        assert_eq!(states(pikv.routers()), states(twin.routers()), "step {i}");
    }
    assert_ne!(states(pikv.routers()), before);
    assert!(states(pikv.routers())[0].miss.iter().any(|miss| *miss > 0.0));
}

/// Where some drafts of a step stay, the loads are those of the tokens that stayed.
#[test]
fn a_step_that_is_taken_back_in_part_counts_what_stayed() {
    let ((cache, mut pikv), (other, mut twin)) = (looped(2), looped(2));
    let (mut a, mut b) = (cache.sequence(), other.sequence());
    for (i, prompt) in [(0, 20), (1, 6), (2, 8), (3, 1)] {
        // The numbers of a step's rows begin with those of a shorter one.
        let stay = if prompt > 2 { prompt - 2 } else { prompt };
        turn(&mut pikv, &mut a, prompt, i, ReadPages::All);
        a.rollback((prompt - stay) as u32).unwrap();
        let before = states(pikv.routers());
        let mut step = twin.begin([(&mut b, stay as u32)]).unwrap();
        for layer in 0..LAYERS {
            let [k, v, _, logits] = rows(i, layer, prompt);
            step.append(layer, &k[..stay * 16], &v[..stay * 16]).unwrap();
            step.route(layer, &logits[..stay * EXPERTS]).unwrap();
        }
        step.commit().unwrap();
        assert_eq!(before, states(twin.routers()), "step {i}");
    }
}

/// Two sequences share a step. If one rolls back, its tokens are unlearnt and those of the other stay learnt; a fork that still has
/// the tokens keeps them learnt.
#[test]
fn of_a_batch_only_what_was_taken_back_is_forgotten() {
    // A fork has the drafts still.
    let ((cache, mut pikv), (other, mut twin)) = (looped(2), looped(2));
    let [mut a, mut x] = [cache.sequence(), other.sequence()];
    turn(&mut pikv, &mut a, 5, 1, ReadPages::All);
    turn(&mut twin, &mut x, 5, 1, ReadPages::All);
    turn(&mut pikv, &mut a, 3, 2, ReadPages::All);
    let (learnt, mut fork) = (states(pikv.routers()), a.fork());
    a.rollback(3).unwrap();
    assert_eq!(states(pikv.routers()), learnt);
    let mut again = fork.fork();
    assert_eq!(states(pikv.routers()), learnt);
    fork.rollback(3).unwrap();
    again.rollback(3).unwrap();
    assert_eq!(states(pikv.routers()), states(twin.routers()));

    let ((cache, mut pikv), (other, mut twin)) = (looped(3), looped(3));
    let [mut a, mut b] = [cache.sequence(), cache.sequence()];
    let [mut x, mut y] = [other.sequence(), other.sequence()];
    together(&mut pikv, vec![(&mut a, 5, 1), (&mut b, 9, 2)]);
    together(&mut twin, vec![(&mut x, 5, 1), (&mut y, 9, 2)]);
    for i in 10..60 {
        let n = 1 + i as usize % 4;
        together(&mut pikv, vec![(&mut a, n, i + 500), (&mut b, 1, i)]);
        a.rollback(n as u32).unwrap();
        together(&mut twin, vec![(&mut y, 1, i)]);
        assert_eq!(states(pikv.routers()), states(twin.routers()), "step {i}");
    }
}

/// The steps kept for rollbacks are bounded: by those that a rollback reaches, and by a number where a sequence stands still.
#[test]
fn what_is_kept_of_steps_does_not_grow() {
    let (cache, mut pikv) = looped(3);
    let (mut idle, mut a) = (cache.sequence(), cache.sequence());
    turn(&mut pikv, &mut idle, 3, 0, ReadPages::All);
    for i in 1..400 {
        turn(&mut pikv, &mut a, 1, i, ReadPages::All);
        assert!(pikv.kept_steps() <= 64 + 4 * 8, "{}", pikv.kept_steps());
    }
    idle.rollback(3).unwrap();
    drop(idle);
    for i in 400..420 {
        turn(&mut pikv, &mut a, 1, i, ReadPages::All);
    }
    assert!(pikv.kept_steps() <= 8 + 1, "{}", pikv.kept_steps());
}
