//! Packed pages compared with independent oracles: their words, attention over them, equal bits in every way of reading, and their part in
//! sequences.

mod attend;
mod bits;
mod bytes;
mod exact;
mod fit;
mod limits;
mod machine;
mod maps;
mod model;
mod oracle;
mod refused;
mod row;
mod setup;
mod state;
mod wide;

fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |h, &part| {
        let mut z = (h ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
