//! The cache of a row, and what it holds.

use crate::rows::Row;
use pikv::{Cache, CacheConfig};
use pikv_engine::measure::results::cpu_time;
use pikv_engine::measure::subject::Subject;
use pikv_engine::measure::timed::Timed;
use pikv_engine::moe::paged::Paged;
use std::error::Error;

/// pikv over `subject` with a row's configuration.
pub fn timed(subject: &Subject, row: &Row, sinks: u32) -> Result<Timed, Box<dyn Error>> {
    let layers = vec![subject.layer(row.dtype, row.keys); subject.layers];
    let config = CacheConfig::new(layers, 4 << 30).ring(row.ring as u32).sinks(sinks);
    let config = match row.by_expert {
        true => config.experts(subject.experts.0, subject.experts.1),
        false => config,
    };
    let cache = Cache::new(row.drop(row.compress(config)))?;
    let mut timed = Timed::new(cache, subject.head_dim, cpu_time);
    timed.rounded = row.rounded;
    Ok(timed)
}

/// Share of the tokens that left the ring, without sinks, that is held.
pub fn kept(paged: &Paged) -> Result<f64, pikv::Error> {
    let (config, sequence) = (paged.cache.config(), &paged.sequence);
    let (mut held, mut all) = (0, 0);
    for (layer, shape) in config.layers.iter().enumerate() {
        let fixed = sequence.in_ring().0 + paged.cache.store(layer)?.sinks;
        let left = sequence.next_position().0.saturating_sub(fixed);
        for head in 0..shape.kv_heads as usize {
            held += u64::from(sequence.resident(layer, head)?.0.saturating_sub(fixed));
            all += u64::from(left);
        }
    }
    Ok(if all == 0 { 1.0 } else { held as f64 / all as f64 })
}

/// bf16 bytes of the tokens of packed pages over the bytes of those pages.
pub fn packed(paged: &Paged) -> Result<f64, pikv::Error> {
    let (mut raw, mut packed) = (0, 0);
    for (layer, shape) in paged.cache.config().layers.iter().enumerate() {
        let token = 2 * u64::from(shape.layout.k_dim + shape.layout.v_dim);
        for head in 0..shape.kv_heads as usize {
            for page in paged.sequence.pages(layer, head)?.filter(|page| page.packed) {
                raw += token * u64::from(page.tokens);
                packed += page.bytes;
            }
        }
    }
    Ok(raw as f64 / packed as f64)
}
