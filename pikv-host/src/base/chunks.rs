//! Copy-on-write lists and values.

use pikv_lanes::fetch;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut, Index, IndexMut, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Whether other handles exist. Check outer handles before inner ones: a holder copies the inner handles before it drops the outer one.
fn is_shared<T>(of: &Arc<T>) -> bool {
    let shared = Arc::strong_count(of) > 1;
    // Makes the counts of inner handles, which another holder changed before it dropped the outer one, visible.
    fence(Ordering::Acquire);
    shared
}

/// A copy-on-write value: clones share it, and the first write through one of them copies it.
#[derive(Debug, Default)]
pub(crate) struct Common<T>(Arc<T>);

impl<T> Common<T> {
    pub fn new(value: T) -> Common<T> {
        Common(Arc::new(value))
    }

    /// Whether other clones share the value.
    pub fn is_shared(&self) -> bool {
        is_shared(&self.0)
    }

    /// Address of the value, and the number of clones that share it.
    pub fn holders(&self) -> (usize, usize) {
        (Arc::as_ptr(&self.0) as usize, Arc::strong_count(&self.0))
    }

    /// Whether both clones share one value.
    pub fn is(&self, other: &Common<T>) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T: Clone> Common<T> {
    /// The value for writing; copies it first if other clones share it.
    pub fn own(of: &mut Common<T>) -> &mut T {
        Arc::make_mut(&mut of.0)
    }
}

impl<T> Clone for Common<T> {
    fn clone(&self) -> Common<T> {
        Common(self.0.clone())
    }
}

impl<T> Deref for Common<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Clone> DerefMut for Common<T> {
    fn deref_mut(&mut self) -> &mut T {
        Common::own(self)
    }
}

/// Adjacent items of a list.
#[derive(Debug)]
pub(crate) struct Chunk<T>(Vec<T>);

impl<T: Clone> Clone for Chunk<T> {
    fn clone(&self) -> Chunk<T> {
        let mut items = Vec::with_capacity(self.0.capacity());
        items.extend_from_slice(&self.0);
        Chunk(items)
    }
}

/// Shared chunks that [`Chunks::rewrite`] replaced, by address: the chunk before, which keeps its address in use, and the one after.
pub(crate) type Rewritten<T> = HashMap<usize, (Arc<Chunk<T>>, Arc<Chunk<T>>)>;

/// A copy-on-write list, shared by chunks of `N` items: a clone copies a pointer for each chunk, and a write to an item of a shared
/// chunk copies that chunk first. Pushes are at the end: `O(N)`, and one in `N` allocates. Pops at the end and at the front are `O(N)`, and
/// one in `N` of those at the front also moves the pointers of all chunks. Inserts are `O(items after them)`.
#[derive(Debug)]
pub(crate) struct Chunks<T, const N: usize = 16> {
    /// Chunks with items, all but the first and the last full, then empty chunks that no clone shares, kept for reuse.
    chunks: SmallVec<[Arc<Chunk<T>>; 2]>,
    /// Number of chunks with items.
    used: usize,
    len: usize,
}

impl<T, const N: usize> Default for Chunks<T, N> {
    fn default() -> Chunks<T, N> {
        Chunks { chunks: SmallVec::new(), used: 0, len: 0 }
    }
}

impl<T, const N: usize> Clone for Chunks<T, N> {
    fn clone(&self) -> Chunks<T, N> {
        Chunks { chunks: self.chunks[..self.used].iter().cloned().collect(), ..*self }
    }
}

impl<T, const N: usize> Chunks<T, N> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The chunk of item `i`, and its index there; also defined past the end.
    fn place(&self, i: usize) -> (usize, usize) {
        let first = self.chunks.first().map_or(0, |chunk| chunk.0.len());
        match i.checked_sub(first) {
            None => (0, i),
            Some(i) => (1 + i / N, i % N),
        }
    }

    pub fn get(&self, i: usize) -> Option<&T> {
        let (chunk, at) = self.place(i);
        self.chunks.get(chunk)?.0.get(at)
    }

    pub fn front(&self) -> Option<&T> {
        self.chunks.first()?.0.first()
    }

    pub fn back(&self) -> Option<&T> {
        self.chunks.get(self.used.checked_sub(1)?)?.0.last()
    }

    /// Prefetches the last item, a pointer of the way to it each time: with `step` 0 the pointer to its chunk, with 1 the chunk, with 2 the
    /// item.
    pub fn fetch_back(&self, step: usize) {
        let chunk = self.used.checked_sub(1).and_then(|last| self.chunks.get(last));
        match (chunk, step) {
            (Some(chunk), 0) => fetch(chunk),
            (Some(chunk), 1) => fetch(&**chunk),
            (Some(chunk), _) => chunk.0.last().into_iter().for_each(fetch),
            (None, _) => (),
        }
    }

    /// Whether a clone shares item `i`, so that a write copies its chunk.
    pub fn is_shared(&self, i: usize) -> bool {
        self.chunks.get(self.place(i).0).is_some_and(is_shared)
    }

    /// The items, in order.
    pub fn iter(&self) -> Iter<'_, T> {
        self.chunks[..self.used].iter().flat_map(items as fn(_) -> _)
    }

    /// The items, in order. Prefetches each item a chunk ahead, for long lists that are not in the CPU's caches.
    pub fn walk(&self) -> impl Iterator<Item = &T> {
        let chunks = &self.chunks[..self.used];
        chunks.iter().enumerate().flat_map(move |(c, chunk)| {
            chunks.get(c + 2).into_iter().for_each(|chunk| fetch(&**chunk));
            let ahead = chunks.get(c + 1).map_or(&[][..], |chunk| &chunk.0);
            chunk.0.iter().enumerate().map(move |(i, item)| {
                ahead.get(i).into_iter().for_each(fetch);
                item
            })
        })
    }

    /// Item `i` and those after it in its chunk; none past the end.
    pub fn rest_of_chunk(&self, i: usize) -> &[T] {
        let (chunk, at) = self.place(i);
        self.chunks.get(chunk).and_then(|chunk| chunk.0.get(at..)).unwrap_or_default()
    }

    /// The chunks: address and number of lists that share it, and items.
    pub fn parts(&self) -> impl Iterator<Item = ((usize, usize), &[T])> {
        let part = |chunk: &'_ Arc<Chunk<T>>| (Arc::as_ptr(chunk) as usize, Arc::strong_count(chunk));
        self.chunks[..self.used].iter().map(move |chunk| (part(chunk), &chunk.0[..]))
    }

    /// A range of the items, in order.
    pub fn range(&self, range: impl RangeBounds<usize>) -> impl DoubleEndedIterator<Item = &T> + Clone {
        let all = std::ops::Range { start: 0, end: self.len };
        let from = match range.start_bound() {
            std::ops::Bound::Included(from) => *from,
            std::ops::Bound::Excluded(from) => *from + 1,
            std::ops::Bound::Unbounded => all.start,
        };
        let to = match range.end_bound() {
            std::ops::Bound::Included(to) => *to + 1,
            std::ops::Bound::Excluded(to) => *to,
            std::ops::Bound::Unbounded => all.end,
        };
        debug_assert!(from <= to && to <= all.end, "{from}..{to} of {}", all.end);
        let ((first, at), (last, until)) = (self.place(from), self.place(to));
        (first..=last).flat_map(move |i| {
            let items = self.chunks.get(i).map_or(&[][..], |chunk| &chunk.0);
            let to = if i == last { until } else { items.len() };
            items[if i == first { at.min(to) } else { 0 }..to].iter()
        })
    }

    /// Number of leading items that satisfy `is`, which no item after them does. `O(log items)`.
    pub fn partition_point(&self, is: impl Fn(&T) -> bool) -> usize {
        let (mut from, mut to) = (0, self.len);
        while from < to {
            let middle = (from + to) / 2;
            if is(&self[middle]) { from = middle + 1 } else { to = middle }
        }
        from
    }

    /// Bytes of memory, from the capacities of the chunks; each clone counts shared chunks in full.
    pub fn bytes(&self) -> usize {
        let counts = 2 * size_of::<usize>();
        let chunk =
            |chunk: &Arc<Chunk<T>>| counts + size_of::<Chunk<T>>() + chunk.0.capacity() * size_of::<T>();
        let list = if self.chunks.spilled() { self.chunks.capacity() * size_of::<usize>() } else { 0 };
        list + self.chunks.iter().map(chunk).sum::<usize>()
    }

    /// Frees empty chunks beyond three for each chunk with items.
    pub fn tighten(&mut self) {
        let most = 4 * self.used.max(1);
        self.chunks.truncate(most);
        if self.chunks.spilled() && self.chunks.capacity() > 4 * most.max(4) {
            self.chunks.shrink_to_fit();
        }
    }
}

impl<T: Clone, const N: usize> Chunks<T, N> {
    /// Copies the chunk of item `i` if it is shared.
    pub fn own(&mut self, i: usize) {
        _ = &mut self[i];
    }

    pub fn back_mut(&mut self) -> Option<&mut T> {
        let last = self.chunks.get_mut(self.used.checked_sub(1)?)?;
        Arc::make_mut(last).0.last_mut()
    }

    /// The last chunk, with room for an item.
    fn room(&mut self) -> &mut Vec<T> {
        let full = |chunk: &Arc<Chunk<T>>| chunk.0.len() == N;
        if self.used.checked_sub(1).is_none_or(|last| full(&self.chunks[last])) {
            if self.used == self.chunks.len() {
                // The first chunk grows to its size, because most runs of models with many experts are short.
                let room = if self.used == 0 { 0 } else { N };
                self.chunks.push(Arc::new(Chunk(Vec::with_capacity(room))));
            }
            self.used += 1;
        }
        &mut Arc::make_mut(&mut self.chunks[self.used - 1]).0
    }

    pub fn push_back(&mut self, item: T) {
        self.room().push(item);
        self.len += 1;
    }

    pub fn extend_from_slice(&mut self, mut items: &[T]) {
        while !items.is_empty() {
            let room = self.room();
            let (these, others) = items.split_at(items.len().min(N - room.len()));
            room.extend_from_slice(these);
            (self.len, items) = (self.len + these.len(), others);
        }
    }

    pub fn pop_back(&mut self) -> Option<T> {
        let last = self.used.checked_sub(1)?;
        let chunk = Arc::make_mut(&mut self.chunks[last]);
        let item = chunk.0.pop();
        self.used -= usize::from(chunk.0.is_empty());
        self.len -= 1;
        item
    }

    pub fn pop_front(&mut self) -> Option<T> {
        let first = self.chunks.first_mut().filter(|_| self.len > 0)?;
        match Arc::get_mut(first) {
            Some(chunk) if chunk.0.len() > 1 => {
                self.len -= 1;
                Some(chunk.0.remove(0))
            }
            Some(chunk) => {
                let item = chunk.0.pop();
                (self.len, self.used) = (self.len - 1, self.used - 1);
                self.chunks.rotate_left(1);
                item
            }
            None => {
                let item = self.front().cloned();
                self.drop_front(1);
                item
            }
        }
    }

    /// Removes the first `n` items, or all. `O(n + chunks)`.
    pub fn drop_front(&mut self, n: usize) {
        let (whole, at) = if n < self.len { self.place(n) } else { (self.used, 0) };
        // Whole chunks are kept for reuse, but for those that a clone shares.
        let mut own = 0;
        for i in 0..whole {
            if let Some(Chunk(items)) = Arc::get_mut(&mut self.chunks[i]) {
                items.clear();
                self.chunks.swap(own, i);
                own += 1;
            }
        }
        self.chunks.drain(own..whole);
        self.chunks.rotate_left(own);
        self.used -= whole;
        self.len -= n.min(self.len);
        if at > 0 {
            Arc::make_mut(&mut self.chunks[0]).0.drain(..at);
        }
    }

    /// Removes all but the first `n` items.
    pub fn truncate(&mut self, n: usize) {
        while self.len > n {
            self.pop_back();
        }
    }

    /// Pops the first item if `is` returns true for it.
    pub fn pop_front_if(&mut self, is: impl FnOnce(&T) -> bool) -> Option<T> {
        if self.front().is_some_and(is) { self.pop_front() } else { None }
    }

    /// Swaps two items, `a < b`.
    fn swap(&mut self, a: usize, b: usize) {
        let ((first, from), (last, to)) = (self.place(a), self.place(b));
        let (before, after) = self.chunks.split_at_mut(last);
        let last = &mut Arc::make_mut(&mut after[0]).0;
        match before.get_mut(first) {
            Some(first) => std::mem::swap(&mut Arc::make_mut(first).0[from], &mut last[to]),
            None => last.swap(from, to),
        }
    }

    /// Calls `edit` for the items for which `is` returns true. Lists that share a chunk share the edited chunk too if each is rewritten with
    /// the same `known`.
    pub fn rewrite(
        &mut self,
        known: &mut Rewritten<T>,
        is: &impl Fn(&T) -> bool,
        edit: &mut impl FnMut(&mut T),
    ) {
        for chunk in &mut self.chunks[..self.used] {
            if let Some(Chunk(items)) = Arc::get_mut(chunk) {
                items.iter_mut().filter(|item| is(item)).for_each(&mut *edit);
                continue;
            }
            let (_, after) = known.entry(Arc::as_ptr(chunk).addr()).or_insert_with(|| {
                let mut after = chunk.clone();
                if after.0.iter().any(is) {
                    Arc::make_mut(&mut after).0.iter_mut().filter(|item| is(item)).for_each(&mut *edit);
                }
                (chunk.clone(), after)
            });
            *chunk = after.clone();
        }
    }

    /// Inserts an item before item `i`.
    pub fn insert(&mut self, i: usize, item: T) {
        self.push_back(item);
        (i + 1..self.len).rev().for_each(|at| self.swap(at - 1, at));
    }

    /// Keeps only the items for which `stays` returns true.
    pub fn retain(&mut self, stays: impl Fn(&T) -> bool) {
        let mut left = 0;
        for i in 0..self.len {
            if stays(&self[i]) {
                if left < i {
                    self.swap(left, i);
                }
                left += 1;
            }
        }
        self.truncate(left);
    }

    /// The first `n` items; shares whole chunks.
    pub fn first(&self, n: usize) -> Chunks<T, N> {
        let mut first = self.clone();
        let (chunk, at) = self.place(n.min(self.len));
        if n < self.len {
            first.chunks.truncate(chunk);
            first.used = first.chunks.len();
            first.len = n - at;
            self.chunks.get(chunk).into_iter().for_each(|chunk| first.extend_from_slice(&chunk.0[..at]));
        }
        first
    }
}

fn items<T>(chunk: &Arc<Chunk<T>>) -> std::slice::Iter<'_, T> {
    chunk.0.iter()
}

/// The items of a list.
pub(crate) type Iter<'a, T> = std::iter::FlatMap<
    std::slice::Iter<'a, Arc<Chunk<T>>>,
    std::slice::Iter<'a, T>,
    fn(&'a Arc<Chunk<T>>) -> std::slice::Iter<'a, T>,
>;

impl<'a, T, const N: usize> IntoIterator for &'a Chunks<T, N> {
    type Item = &'a T;
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Iter<'a, T> {
        self.iter()
    }
}

impl<T: Clone, const N: usize> FromIterator<T> for Chunks<T, N> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Chunks<T, N> {
        let mut list = Chunks::default();
        items.into_iter().for_each(|item| list.push_back(item));
        list
    }
}

impl<T, const N: usize> Index<usize> for Chunks<T, N> {
    type Output = T;

    fn index(&self, i: usize) -> &T {
        let (chunk, at) = self.place(i);
        &self.chunks[chunk].0[at]
    }
}

impl<T: Clone, const N: usize> IndexMut<usize> for Chunks<T, N> {
    fn index_mut(&mut self, i: usize) -> &mut T {
        let (chunk, at) = self.place(i);
        &mut Arc::make_mut(&mut self.chunks[chunk]).0[at]
    }
}

#[cfg(test)]
mod tests;
