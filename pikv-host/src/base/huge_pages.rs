//! Large lists on huge pages.

use std::collections::VecDeque;

/// Smallest list, in bytes, that uses huge pages: several of them, so that the partial pages at its ends do not matter.
const LARGE: usize = 8 << 20;

/// Reserves capacity for `n` elements in all, on huge pages if the list is large: a scan of hundreds of megabytes then takes one TLB
/// entry, and one page fault in new memory, for each 2 MiB instead of each 4 KiB.
pub fn reserve<T>(list: &mut Vec<T>, n: usize) {
    if n > list.capacity() {
        list.reserve_exact(n - list.len());
        advise(list);
    }
}

/// `list.push_back(item)`, on huge pages if the list is large.
pub fn push_back<T>(list: &mut VecDeque<T>, item: T) {
    if list.len() == list.capacity() && 2 * list.len() * size_of::<T>() >= LARGE {
        let mut larger = Vec::new();
        reserve(&mut larger, 2 * list.len());
        larger.extend(list.drain(..));
        *list = larger.into();
    }
    list.push_back(item);
}

/// Lists with fewer elements are not shrunk.
pub const FEW: usize = 32;

/// Shrinks the capacity if a quarter of it or less is in use, to twice the length.
pub fn tighten<T>(list: &mut VecDeque<T>) {
    if list.capacity() >= 2 * FEW && list.len() <= list.capacity() / 4 {
        list.shrink_to(2 * list.len());
    }
}

/// `list.resize(n, item)`, on huge pages if the list is large.
pub fn resize<T: Clone>(list: &mut Vec<T>, n: usize, item: T) {
    if n > list.capacity() && n * size_of::<T>() >= LARGE {
        reserve(list, n.max(2 * list.capacity()));
    }
    list.resize(n, item);
}

/// Asks for huge pages. Only a hint: without them everything works, slower.
fn advise<T>(list: &Vec<T>) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let (start, bytes) = (list.as_ptr() as usize, list.capacity() * size_of::<T>());
        let (from, to) = (start.next_multiple_of(HUGE), (start + bytes) / HUGE * HUGE);
        if bytes >= LARGE && from < to {
            // SAFETY: whole pages within the list's own allocation; the advice changes no content.
            unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = list;
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    #[test]
    fn lists_hold_what_plain_ones_do() {
        let n = 2 * super::LARGE / size_of::<u64>();
        let (mut list, mut queue, mut all) = (Vec::new(), VecDeque::new(), Vec::new());
        for i in 0..n as u64 {
            super::push_back(&mut queue, i);
            if i % 3 == 0 {
                queue.pop_front();
            }
        }
        assert!(queue.iter().copied().eq(n as u64 - queue.len() as u64..n as u64));
        for i in (0..n).step_by(999) {
            super::resize(&mut list, i, i);
            all.resize(i, i);
        }
        assert!(list == all);
        super::reserve(&mut list, 2 * n);
        assert!(list == all && list.capacity() >= 2 * n);
    }
}
