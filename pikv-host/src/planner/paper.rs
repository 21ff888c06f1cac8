//! The formulas of arXiv 2508.06526 (sections on memory and latency) as printed, and the terms that they omit.
//!
//! For comparison only; plan with [`Planner`](super::Planner) and [`StepTime`](super::StepTime). All are plain f64 arithmetic without
//! checks: a divisor of 0 gives infinity.

/// Variables of the memory formula: one layer and KV head, in vector elements, on one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    /// `d`: width of one K (or V) row.
    pub width: f64,
    /// `rho`: raw bytes over stored bytes, scales included ([`Codec::ratio`](crate::codec::Codec::ratio)).
    pub ratio: f64,
    /// `L`: tokens.
    pub tokens: f64,
    /// `G`: devices.
    pub devices: f64,
    /// `K`: resident pages of a device.
    pub pages: f64,
}

/// `M_total = (2d/rho) (L/(G S) + K S)`: elements on a device with pages of `page` tokens (`S`).
///
/// The first term counts one K/V pair for each *page* that the device owns ([`summaries`]): its metadata, Quest's min and max key. The
/// second counts the tokens of the `K` resident pages. In the paper's setting that is 512 summaries and 512 of the 16,384 tokens that
/// the device owns; the paper does not say where the others are. Layers, KV heads, bytes an element, padding, positions and the ring are
/// omitted.
pub fn m_total(memory: &Memory, page: f64) -> f64 {
    2.0 * memory.width / memory.ratio * (summaries(memory, page) + memory.pages * page)
}

/// `L/(G S)`: pages of `page` tokens that a device owns, the number of summaries in [`m_total`].
pub fn summaries(memory: &Memory, page: f64) -> f64 {
    memory.tokens / (memory.devices * page)
}

/// `S* = sqrt(L / (K G))`: the page size, in tokens, that minimises [`m_total`]. It need not be whole; pikv's pages always have 32
/// tokens.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::planner::paper::{Memory, m_star, s_star, summaries};
/// let paper = Memory { width: 128.0, ratio: 1.0, tokens: 131072.0, devices: 8.0, pages: 16.0 };
/// assert_eq!(s_star(&paper), 32.0);
/// assert_eq!(summaries(&paper, 32.0), 512.0);
/// assert_eq!(m_star(&paper), 2.0 * 128.0 * (512.0 + 512.0));
/// ```
pub fn s_star(memory: &Memory) -> f64 {
    (memory.tokens / (memory.pages * memory.devices)).sqrt()
}

/// `M* = (4d/rho) sqrt(K L/G)`: [`m_total`] at [`s_star`].
pub fn m_star(memory: &Memory) -> f64 {
    4.0 * memory.width / memory.ratio * (memory.pages * memory.tokens / memory.devices).sqrt()
}

/// `L/G + L/E`: rows that a device holds in the paper's worked example, with each token filed under all of its experts.
///
/// For 16 experts on 8 devices at 128K: 24,576, which is 81.25 % less than one full copy (the paper says 83 %). pikv stores a token
/// once, which gives `L/G`: 16,384, or 87.5 % less.
pub fn rows(tokens: f64, devices: f64, experts: f64) -> f64 {
    tokens / devices + tokens / experts
}

/// Variables of the latency formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// `d`: width of one K (or V) row.
    pub width: f64,
    /// `k`: experts a token.
    pub top_k: f64,
    /// `B`: sequences of the batch.
    pub batch: f64,
    /// `rho`: raw bytes over stored bytes.
    pub ratio: f64,
    /// `beta`: elements a second that memory delivers.
    pub beta: f64,
    /// `eta`: operations an element.
    pub eta: f64,
    /// `gamma`: operations a second.
    pub gamma: f64,
}

/// `T_step = (d k B/rho) (2/beta + eta/gamma)`, in seconds.
///
/// The formula does not contain `L`, as if a step read one token an expert; nor layers, KV heads, bytes an element (so `beta` is in
/// elements), or a constant cost of a step. Compute also shrinks with `rho`, although packed data has to be unpacked.
pub fn t_step(latency: &Latency) -> f64 {
    let Latency { width, top_k, batch, ratio, beta, eta, gamma } = *latency;
    width * top_k * batch / ratio * (2.0 / beta + eta / gamma)
}
