//! Final evictions, and compaction of pages that lost tokens.

use crate::base::deque::first_if;
use crate::memory::pool::Pool;
use crate::pages::compact::CompactedRun;
use crate::pages::filing::LayerPages;
use crate::pages::past::Killed;
use pikv_core::plan::LayerShape;
use smallvec::SmallVec;

impl LayerPages {
    /// Makes evictions final that no rollback to `len` tokens or more can undo, and compacts pages that lost tokens. Records the
    /// changes if a rollback to fewer tokens is possible.
    pub fn settle(&mut self, pool: &Pool, shape: &LayerShape, len: u32) {
        if self.rule.is_none() {
            return;
        }
        let slack = pool.shape.store.ring.slack();
        // Runs whose compaction failed before are tried again.
        let mut thinned: SmallVec<[(usize, usize); 8]> = self.owed.drain(..).collect();
        while let Some(killed) =
            first_if(&mut self.past.killed, |killed| killed.by.saturating_add(slack) <= len)
        {
            let Killed { head, run: c, ordinal, lanes, .. } = killed;
            let run = &mut self.heads[head].runs[c];
            let dead = run.dead;
            let freed = run.settle(ordinal, lanes);
            if slack > 0 {
                self.note_final(len, dead, killed, freed);
            }
            if !thinned.contains(&(head, c)) {
                thinned.push((head, c));
            }
        }
        let kept = pool.shape.store.ring.kept_from(len);
        for (head, c) in thinned {
            let whose = CompactedRun { pool, shape, head: self.first_head + head as u32, run: c };
            let run = &mut self.heads[head].runs[c];
            run.sweep(kept);
            let dead = run.dead;
            match run.compact(&whose, kept, slack > 0) {
                Ok(None) => {}
                Ok(Some(compacted)) => self.note_compacted(len, head, c, dead, compacted),
                Err(_) => {
                    pool.failures.uncompacted();
                    self.owed.push((head, c));
                }
            }
        }
    }
}
