//! Lists compared with plain ones, the memory of clones, and the allocations of sliding lists.

use super::{Chunks, Common};
use std::sync::Arc;

const CHUNK: usize = 16;

/// Draws from a linear congruential generator.
fn draw(seed: &mut u32, n: usize) -> usize {
    *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    (*seed >> 8) as usize % n.max(1)
}

/// Applies one random change to a list and to a plain one.
fn change(seed: &mut u32, list: &mut Chunks<Arc<usize>>, plain: &mut Vec<usize>, grows: bool) {
    let (x, at) = (draw(seed, 1 << 20), draw(seed, plain.len()));
    match draw(seed, if grows { 8 } else { 14 }) {
        0..4 => {
            list.push_back(Arc::new(x));
            plain.push(x);
        }
        4 if !plain.is_empty() => {
            list[at] = Arc::new(x);
            plain[at] = x;
        }
        5 => {
            list.insert(at, Arc::new(x));
            plain.insert(at, x);
        }
        6 | 8 => {
            let front = (!plain.is_empty()).then(|| plain.remove(0));
            assert_eq!(list.pop_front().as_deref(), front.as_ref());
        }
        7 | 9 => assert_eq!(list.pop_back().as_deref(), plain.pop().as_ref()),
        10 => {
            list.retain(|item| **item % 8 > 0);
            plain.retain(|item| item % 8 > 0);
            list.tighten();
        }
        11 => {
            let more: Vec<usize> = (0..x % 40).collect();
            list.extend_from_slice(&more.iter().copied().map(Arc::new).collect::<Vec<_>>());
            plain.extend(more);
        }
        12 => {
            list.drop_front(x % 50);
            plain.drain(..(x % 50).min(plain.len()));
        }
        13 => {
            list.truncate(at);
            plain.truncate(at);
        }
        _ => {}
    }
}

#[test]
fn clones_hold_what_plain_lists_do_whatever_becomes_of_the_others() {
    let mut seed = 5;
    let mut lists: Vec<(Chunks<Arc<usize>>, Vec<usize>)> = vec![Default::default()];
    for round in 0..6000 {
        let i = draw(&mut seed, lists.len());
        match draw(&mut seed, 40) {
            0 if lists.len() < 5 => lists.push(lists[i].clone()),
            1 if lists.len() > 1 => drop(lists.swap_remove(i)),
            2 if lists.len() < 5 => {
                let n = draw(&mut seed, lists[i].1.len() + 1);
                lists.push((lists[i].0.first(n), lists[i].1[..n].to_vec()));
            }
            _ => {
                let (list, plain) = &mut lists[i];
                change(&mut seed, list, plain, round / 700 % 2 == 0);
            }
        }
        for (list, plain) in &lists {
            let n = plain.len();
            assert_eq!((list.len(), list.is_empty()), (n, n == 0));
            assert!(list.iter().map(|item| &**item).eq(plain), "{list:?} {plain:?}");
            assert!(list.walk().map(|item| &**item).eq(plain));
            assert!(list.iter().rev().map(|item| &**item).eq(plain.iter().rev()));
            let from = draw(&mut seed, n + 1);
            let to = from + draw(&mut seed, n + 1 - from);
            assert!(list.range(from..to).map(|item| &**item).eq(&plain[from..to]));
            assert!(list.range(from..).rev().map(|item| &**item).eq(plain[from..].iter().rev()));
            assert_eq!(
                (list.front().map(|x| **x), list.back().map(|x| **x)),
                (plain.first().copied(), plain.last().copied())
            );
            assert_eq!(list.get(n), None);
            assert!((0..n).all(|i| *list[i] == plain[i]));
            let rest = list.rest_of_chunk(from);
            assert!(
                rest.is_empty() == (from == n) && rest.iter().map(|x| &**x).eq(&plain[from..][..rest.len()])
            );
        }
    }
    drop(lists);
}

#[test]
fn a_clone_takes_a_pointer_a_chunk_and_a_write_one_chunk() {
    let item = Arc::new(7);
    let mut list: Chunks<Arc<usize>> = std::iter::repeat_n(item.clone(), 10 * CHUNK).collect();
    let fork = list.clone();
    assert_eq!(Arc::strong_count(&item), 1 + 10 * CHUNK);
    assert!((0..list.len()).all(|i| list.is_shared(i)));
    list[3 * CHUNK] = Arc::new(8);
    // Items of the chunk without the written one.
    assert_eq!(Arc::strong_count(&item), 1 + 11 * CHUNK - 1);
    assert!(
        (0..list.len())
            .all(|i| list.is_shared(i) == (i / CHUNK != 3) && list.is_shared(i) == fork.is_shared(i))
    );
    drop(fork);
    assert!(!(0..list.len()).any(|i| list.is_shared(i)));
    assert_eq!(Arc::strong_count(&item), 10 * CHUNK);
}

/// Lists that share chunks share the rewritten ones; chunks in which nothing changes stay the same.
#[test]
fn chunks_are_rewritten_once_for_all_lists() {
    let mut list: Chunks<usize> = (0..10 * CHUNK).collect();
    let mut fork = list.clone();
    let other = list.clone();
    fork[0] = 1000;
    let is = |item: &usize| (3 * CHUNK..4 * CHUNK).contains(item) || *item == 7;
    let mut known = super::Rewritten::new();
    let mut edited = 0;
    for list in [&mut list, &mut fork] {
        list.rewrite(&mut known, &is, &mut |item| {
            edited += 1;
            *item += 1;
        });
    }
    drop(known);
    // The first chunk is that of each list, and the fourth that of both.
    assert_eq!(edited, 2 + CHUNK);
    assert!(list.iter().copied().eq((0..10 * CHUNK).map(|item| item + usize::from(is(&item)))));
    assert!(fork.iter().skip(1).eq(list.iter().skip(1)) && fork[0] == 1000);
    let address = |list: &Chunks<usize>, i: usize| list.parts().nth(i).unwrap().0.0;
    let shares = |a: &Chunks<usize>, b: &Chunks<usize>| -> Vec<bool> {
        (0..10).map(|i| address(a, i) == address(b, i)).collect()
    };
    assert_eq!(shares(&list, &fork), (0..10).map(|i| i != 0).collect::<Vec<_>>());
    assert_eq!(shares(&list, &other), (0..10).map(|i| i != 0 && i != 3).collect::<Vec<_>>());
    assert!(other.iter().copied().eq(0..10 * CHUNK));
}

#[test]
fn lists_that_slide_ask_for_no_memory_and_give_back_what_they_leave() {
    let mut list: Chunks<usize> = (0..5 * CHUNK).collect();
    let chunks = |list: &Chunks<usize>| list.chunks.iter().map(Arc::as_ptr).collect::<Vec<_>>();
    for i in 0..CHUNK {
        list.push_back(i);
        list.pop_front();
    }
    let mut before = chunks(&list);
    for i in 0..10 * CHUNK {
        list.push_back(i);
        list.pop_front();
    }
    let mut after = chunks(&list);
    before.sort_unstable();
    after.sort_unstable();
    assert_eq!(before, after);
    let held = list.bytes();
    list.retain(|item| *item == 0);
    list.tighten();
    assert!(list.bytes() <= held, "{} of {held}", list.bytes());
    (0..100 * CHUNK).for_each(|i| list.push_back(i));
    (0..100 * CHUNK).for_each(|_| _ = list.pop_front());
    list.tighten();
    assert!(list.bytes() < 8 * CHUNK * size_of::<usize>(), "{}", list.bytes());
}

#[test]
fn a_shared_value_is_copied_by_who_writes() {
    let mut a = Common::new(vec![1]);
    let b = a.clone();
    assert!(a.is_shared() && a.is(&b));
    a.push(2);
    assert!(!a.is_shared() && !b.is_shared() && !a.is(&b));
    assert_eq!((&*a, &*b), (&vec![1, 2], &vec![1]));
}
