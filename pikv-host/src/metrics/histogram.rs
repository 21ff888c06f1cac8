//! Counts by powers of two.

/// One bucket for each bit length of a u64, including 0.
const BUCKETS: usize = 65;

/// Counts of values by magnitude, in constant memory. Bucket 0 is the value 0, bucket `i` the values from `2^(i-1)` to `2^i - 1`. Counts
/// and the sum saturate.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::metrics::Histogram;
/// let mut ages = Histogram::default();
/// [0, 1, 2, 3, 900].iter().for_each(|age| ages.record(*age));
/// assert_eq!(ages.buckets().collect::<Vec<_>>(), [(0, 0, 1), (1, 1, 1), (2, 3, 2), (512, 1023, 1)]);
/// assert_eq!((ages.count(), ages.min(), ages.max(), ages.mean()), (5, Some(0), Some(900), Some(181.2)));
/// assert_eq!(ages.quantile(0.5), Some(3));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    sum: u128,
    min: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: [0; BUCKETS], sum: 0, min: u64::MAX, max: 0 }
    }
}

impl Histogram {
    /// Counts `value`.
    pub fn record(&mut self, value: u64) {
        let count = &mut self.counts[(u64::BITS - value.leading_zeros()) as usize];
        *count = count.saturating_add(1);
        self.sum = self.sum.saturating_add(value.into());
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(other.counts).for_each(|(a, b)| *a = a.saturating_add(b));
        self.sum = self.sum.saturating_add(other.sum);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Number of values counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// The smallest value; `None` without values.
    pub fn min(&self) -> Option<u64> {
        (self.count() > 0).then_some(self.min)
    }

    /// The largest value; `None` without values.
    pub fn max(&self) -> Option<u64> {
        (self.count() > 0).then_some(self.max)
    }

    /// The mean; `None` without values.
    pub fn mean(&self) -> Option<f64> {
        (self.count() > 0).then(|| self.sum as f64 / self.count() as f64)
    }

    /// An upper bound of the `q` quantile: the end of its bucket, or the largest value if that is less. Below twice the true quantile.
    /// `None` without values, or for a `q` outside 0..=1.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let count = self.count();
        if count == 0 || !(0.0..=1.0).contains(&q) {
            return None;
        }
        let rank = (q * count as f64).ceil().max(1.0) as u64;
        let mut below = 0u64;
        self.buckets()
            .find(|(.., n)| {
                below = below.saturating_add(*n);
                below >= rank
            })
            .map(|(_, last, _)| last.min(self.max))
    }

    /// Non-empty buckets: smallest and largest possible value, and the count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.counts.iter().enumerate().filter(|(_, n)| **n > 0).map(|(i, n)| match i {
            0 => (0, 0, *n),
            i => (1 << (i - 1), u64::MAX >> (BUCKETS - 1 - i), *n),
        })
    }
}
