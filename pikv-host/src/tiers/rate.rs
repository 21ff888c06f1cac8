//! How fast tiers are, here and now.

/// Rates of a tier, in bytes a second.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TierRate {
    /// Its name.
    pub name: String,
    /// Bytes that it may hold.
    pub capacity: u64,
    /// Bytes a second that come up, one page after the other, as the thread reads ahead.
    pub read: f64,
    /// Bytes a second that go down.
    pub write: f64,
}
