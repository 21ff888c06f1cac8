//! Measured rates of tiers.

/// Rates of a tier, in bytes a second.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TierRate {
    /// Name of the tier.
    pub name: String,
    /// Bytes that it can hold.
    pub capacity: u64,
    /// Bytes a second read from it, one page after the other, as the prefetch thread reads.
    pub read: f64,
    /// Bytes a second written to it.
    pub write: f64,
}
