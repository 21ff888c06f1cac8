//! Free pages of a chunk, and the order in which they are allocated.

/// Free pages of a chunk. They are allocated in the order of their addresses, cyclically, so that the pages of a step are also read
/// in that order and the processor's prefetchers help.
///
/// A run is read fastest if its pages are adjacent. So a page asks for the place after the last page of its run; the first page of a run
/// asks for the first of eight places that are all free, so that there is room after it.
#[derive(Debug)]
pub(super) struct Free {
    /// Bit `i % 64` of word `i / 64` is set if page `i` is free.
    bits: Box<[u64]>,
    pub pages: u32,
    pub count: u32,
    /// Groups of eight pages (the last may be shorter) that are all free.
    pub whole: u32,
    /// The page after the last allocated one.
    from: u32,
}

/// Pages of a group, the room of a run.
const EIGHT: u32 = 8;

impl Free {
    pub fn all(pages: u32) -> Free {
        let left = |word: u32| pages - word * 64;
        let bits = (0..pages.div_ceil(64)).map(|word| u64::MAX >> (64 - left(word).min(64)));
        Free { bits: bits.collect(), pages, count: pages, whole: pages.div_ceil(EIGHT), from: 0 }
    }

    /// Allocates the first free page after the last allocated one, cyclically.
    pub fn any(&mut self) -> Option<u32> {
        let bit = self.find(|bits| bits)?;
        Some(self.remove(bit))
    }

    /// Allocates the first page of a group of eight that are all free.
    pub fn first_of_eight(&mut self) -> Option<u32> {
        let last = self.pages.next_multiple_of(EIGHT) - EIGHT;
        let bit = (self.whole > 0).then(|| self.find(whole_eights)).flatten();
        let last_is_free = || (self.whole > 0 && self.is_whole(last)).then_some(last);
        let bit = bit.or_else(last_is_free)?;
        Some(self.remove(bit))
    }

    /// Allocates page `index`, if it is free, and does not start a group with pages in use.
    pub fn at(&mut self, index: u32) -> Option<u32> {
        let free = index < self.pages && self.bits[index as usize / 64] >> (index % 64) & 1 == 1;
        let fits = free && (!index.is_multiple_of(EIGHT) || self.is_whole(index));
        fits.then(|| self.remove(index))
    }

    /// Whether all pages of the group of page `index` are free.
    fn is_whole(&self, index: u32) -> bool {
        let first = index - index % EIGHT;
        let all = u64::MAX >> (64 - (self.pages - first).min(EIGHT));
        self.bits[first as usize / 64] >> (first % 64) & all == all
    }

    /// The first page after the last allocated one, cyclically, whose bit `of` keeps.
    fn find(&self, of: impl Fn(u64) -> u64) -> Option<u32> {
        let (first, words) = (self.from as usize / 64, self.bits.len());
        // The first word is checked twice: from the start of the search, and up to it.
        let after = u64::MAX << (self.from % 64);
        let looks = (0..=words).map(|i| match i {
            0 => (first, after),
            i if i == words => (first, !after),
            i => ((first + i) % words, u64::MAX),
        });
        let mut found = looks.map(|(word, mask)| (word, of(self.bits[word]) & mask));
        let (word, bits) = found.find(|(_, bits)| *bits != 0)?;
        Some(word as u32 * 64 + bits.trailing_zeros())
    }

    fn remove(&mut self, index: u32) -> u32 {
        self.whole -= u32::from(self.is_whole(index));
        self.bits[index as usize / 64] &= !(1 << (index % 64));
        self.count -= 1;
        self.from = (index + 1) % self.pages;
        index
    }

    pub fn give_back(&mut self, index: u32) {
        self.bits[index as usize / 64] |= 1 << (index % 64);
        self.count += 1;
        self.whole += u32::from(self.is_whole(index));
    }
}

/// Keeps the lowest bit of each byte whose bits are all set.
fn whole_eights(mut bits: u64) -> u64 {
    for shift in [1, 2, 4] {
        bits &= bits >> shift;
    }
    bits & 0x0101_0101_0101_0101
}

#[cfg(test)]
mod tests {
    use super::Free;
    use std::collections::BTreeSet;

    #[test]
    fn pages_are_given_out_round_and_round_and_runs_side_by_side() {
        for pages in [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 200] {
            let mut free = Free::all(pages);
            let mut held = BTreeSet::new();
            let (mut from, mut x) = (0, 1u64);
            let mut draw = |n: u32| {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (x >> 33) as u32 % n.max(1)
            };
            let eight = |first: u32| first..(first + 8).min(pages);
            for _ in 0..4000 {
                let whole = |held: &BTreeSet<u32>, first: u32| eight(first).all(|i| !held.contains(&i));
                let round = (0..pages).map(|i| (from + i) % pages);
                let (got, wanted) = match draw(6) {
                    0 => (free.any(), round.clone().find(|i| !held.contains(i))),
                    1 => {
                        let mut firsts = round.filter(|i| i % 8 == 0);
                        // A short group at the end is used only if there is no other.
                        let full = firsts.clone().find(|i| i + 8 <= pages && whole(&held, *i));
                        (free.first_of_eight(), full.or_else(|| firsts.find(|i| whole(&held, *i))))
                    }
                    2 => {
                        let at = draw(pages + 1);
                        let fits = at < pages && !held.contains(&at) && (at % 8 != 0 || whole(&held, at));
                        (free.at(at), fits.then_some(at))
                    }
                    _ => {
                        if let Some(&back) = held.iter().nth(draw(held.len() as u32) as usize) {
                            held.remove(&back);
                            free.give_back(back);
                        }
                        continue;
                    }
                };
                assert_eq!(got, wanted);
                if let Some(index) = got {
                    held.insert(index);
                    from = (index + 1) % pages;
                }
                assert_eq!(free.count, pages - held.len() as u32);
                let firsts = (0..pages).step_by(8);
                assert_eq!(free.whole as usize, firsts.filter(|i| whole(&held, *i)).count());
            }
            while free.any().is_some() {}
            assert_eq!((free.count, free.whole), (0, 0));
        }
    }
}
