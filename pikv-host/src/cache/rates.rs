//! Measures the transfer rates of the tiers of a cache.

use crate::base::error::Error;
use crate::cache::Cache;
use crate::tiers::TierRate;
use pikv_core::warp::LANES;
use std::time::Instant;

impl Cache {
    /// Writes `pages` pages of `page_bytes` (rounded up to a word) to each lower tier and reads them back, three times, and returns the
    /// median rates. Takes `pages * page_bytes` of host memory meanwhile. The system's page cache counts as part of a file tier, so measure
    /// with as many pages as the tier will hold.
    ///
    /// # Errors
    /// [`Error::NoTiers`], [`Error::TierFull`] if a tier has no room for the pages, [`Error::Tier`].
    pub fn tier_rates(&self, page_bytes: u64, pages: usize) -> Result<Vec<TierRate>, Error> {
        let levels = self.inner.pool.tiers.as_ref().ok_or(Error::NoTiers)?;
        let (page, pages) = (page_bytes.div_ceil(4).max(1), pages.max(1));
        let bytes = page as f64 * 4.0 * pages as f64;
        // Checked before memory is allocated: a mistake in the units must not abort the process.
        for level in &levels.levels {
            let available = level.available();
            if bytes > available as f64 {
                let tier = level.name().to_owned();
                return Err(Error::TierFull { tier, needed: page_bytes, available });
            }
        }
        let words: Vec<u32> = (0..page).map(|i| i as u32).collect();
        // Reads go to one existing buffer for each page, as in attention.
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
