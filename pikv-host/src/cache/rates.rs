//! How fast the tiers of a cache are.

use crate::base::error::Error;
use crate::cache::Cache;
use crate::tiers::TierRate;
use pikv_core::warp::LANES;
use std::time::Instant;

impl Cache {
    /// Writes `pages` pages of `page_bytes` (rounded up to a word) to each tier beneath the first, reads them back, three times, and
    /// gives the median rates. Takes as many bytes of memory meanwhile. What the system's page cache holds of a file is part of the
    /// rate, so take as many pages as will lie there.
    ///
    /// # Errors
    /// A cache without tiers, [`Error::TierFull`] if a tier has no room for them beside what is there, [`Error::Tier`].
    pub fn tier_rates(&self, page_bytes: u64, pages: usize) -> Result<Vec<TierRate>, Error> {
        let levels = self.inner.pool.tiers.as_ref().ok_or(Error::NoTiers)?;
        let (page, pages) = (page_bytes.div_ceil(4).max(1), pages.max(1));
        let bytes = page as f64 * 4.0 * pages as f64;
        // Before any memory is taken: a slip of the units should not end the process.
        for level in &levels.levels {
            let available = level.available();
            if bytes > available as f64 {
                let tier = level.name().to_owned();
                return Err(Error::TierFull { tier, needed: page_bytes, available });
            }
        }
        let words: Vec<u32> = (0..page).map(|i| i as u32).collect();
        // As attention has them: in a buffer each, which were there before.
        let mut back = vec![words.clone(); pages];
        let median = |mut rates: [f64; 3]| {
            rates.sort_by(f64::total_cmp);
            rates[1]
        };
        let mut rates = Vec::new();
        for level in &levels.levels {
            let (mut read, mut write) = ([0.0; 3], [0.0; 3]);
            for (read, write) in read.iter_mut().zip(&mut write) {
                let from = Instant::now();
                let slots = (0..pages).map(|_| level.put(&words, [u32::MAX; LANES]));
                let slots = slots.collect::<Result<Vec<_>, _>>()?;
                *write = bytes / from.elapsed().as_secs_f64().max(1e-9);
                let from = Instant::now();
                for (slot, back) in slots.iter().zip(&mut back) {
                    slot.read_into(back)?;
                }
                *read = bytes / from.elapsed().as_secs_f64().max(1e-9);
            }
            let capacity = level.usage().capacity;
            rates.push(TierRate {
                name: level.name().to_owned(),
                capacity,
                read: median(read),
                write: median(write),
            });
        }
        Ok(rates)
    }
}
