//! Finds the oldest tokens of a head without a ranking.

use crate::codec::HeadCodec;
use crate::eviction::ranked::{AHEAD, Gone};
use crate::pages::entry::{Entry, PageState};
use crate::pages::run::Run;
use crate::pages::runs::Runs;
use crate::policy::pinned;
use pikv_lanes::fetch;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Reading position in a run.
struct Cursor<'a> {
    run: usize,
    of: &'a Run,
    codec: Option<&'a HeadCodec>,
    /// Index of the page in the run, its lanes not visited yet, and its lanes to evict.
    at: usize,
    left: u32,
    gone: u32,
}

impl Cursor<'_> {
    /// Position of the next token.
    fn next(&mut self) -> Option<u32> {
        while self.left == 0 {
            self.at += 1;
            let ahead = |pages: usize| self.of.entries.get(self.at + pages);
            ahead(2 * AHEAD).into_iter().for_each(fetch);
            if let Some(Entry { held: PageState::Open(page), .. }) = ahead(AHEAD) {
                fetch(page.positions());
            }
            self.left = self.of.entries.get(self.at)?.live;
        }
        self.of.entries[self.at].position(self.codec, self.left.trailing_zeros())
    }

    /// All lanes of a page, of which none is visited and `position` is the first, if all are to be evicted: at most `n`, none pinned, and
    /// older than position `until`.
    fn whole(&self, position: u32, until: u32, n: usize, pins: &[Range<u32>]) -> Option<u32> {
        let entry = &self.of.entries[self.at];
        if self.left != entry.live || entry.live.count_ones() as usize > n {
            return None;
        }
        // Positions of a page ascend.
        let last = entry.position(self.codec, entry.live.ilog2())?;
        let next = pins.partition_point(|pin| pin.end <= position);
        let pinned = pins.get(next).is_some_and(|pin| pin.start <= last);
        (last < until && !pinned).then_some(entry.live)
    }

    /// The lanes of the page to evict.
    fn page(&self) -> Option<Gone> {
        (self.gone != 0).then(|| (self.run, self.of.entries[self.at].ordinal, self.gone))
    }
}

/// Adds to `gone` the `n` oldest unpinned tokens of the experts' runs, or all if there are fewer. `O(n log runs)` at most, plus the
/// pinned and already evicted tokens that it skips; `O(log runs)` a page where whole pages are the oldest.
pub(crate) fn oldest(
    runs: &Runs,
    codec: Option<&HeadCodec>,
    mut n: usize,
    pins: &[Range<u32>],
    gone: &mut Vec<Gone>,
) {
    let live = runs.experts().filter(|(_, of)| of.live() > 0);
    let start = |(run, of)| Cursor { run, of, codec, at: 0, left: of.entries[0].live, gone: 0 };
    let mut cursors: Vec<Cursor<'_>> = live.map(start).collect();
    let first = |(i, cursor): (usize, &mut Cursor<'_>)| Some(Reverse((cursor.next()?, i)));
    let mut heads: BinaryHeap<_> = cursors.iter_mut().enumerate().filter_map(first).collect();
    while let Some(Reverse((mut position, i))) = heads.pop().filter(|_| n > 0) {
        let until = heads.peek().map_or(u32::MAX, |Reverse((position, _))| *position);
        let cursor = &mut cursors[i];
        // Stays in one page while its tokens are older than those of all other runs.
        let page = cursor.at;
        loop {
            let bit = cursor.left & cursor.left.wrapping_neg();
            let whole = cursor.whole(position, until, n, pins);
            if let Some(lanes) = whole.or_else(|| (!pinned(pins, position)).then_some(bit)) {
                cursor.gone |= lanes;
                n -= lanes.count_ones() as usize;
            }
            cursor.left &= !whole.unwrap_or(bit);
            if cursor.left == 0 {
                gone.extend(cursor.page());
                cursor.gone = 0;
            }
            match cursor.next() {
                Some(next) if n > 0 && cursor.at == page && next < until => position = next,
                Some(next) => break heads.push(Reverse((next, i))),
                None => break,
            }
        }
    }
    gone.extend(cursors.iter().filter_map(Cursor::page));
}
