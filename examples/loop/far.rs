//! Share of distant attention of each KV head, for Duo's gates.

use crate::{Keys, SINKS};
use pikv::report::{PageMass, Place};
use pikv::{Cache, CacheConfig, Dtype};
use pikv_engine::measure::subject::Subject;
use pikv_engine::measure::watched::{Watch, Watched};
use std::error::Error;

/// Tokens that count as near.
const NEAR: u32 = 128;

/// `[layers][kv_heads]`: the share of the attention over `ids` outside the sinks and the near tokens.
pub fn far(subject: &Subject, ids: &[u32]) -> Result<Vec<Vec<f32>>, Box<dyn Error>> {
    let layers = vec![subject.layer(Dtype::Bf16, Keys::Rotated); subject.layers];
    let cache = Cache::new(CacheConfig::new(layers, 4 << 30).ring(NEAR).sinks(SINKS))?;
    let sums = Sums(vec![vec![(0.0, 0.0); subject.kv_heads]; subject.layers]);
    let mut watched = Watched::new(cache, subject.head_dim, sums);
    let mut logits = Vec::new();
    for ids in ids.chunks(NEAR as usize) {
        subject.forward(ids, &mut watched, &mut logits)?;
    }
    let share = |(far, all): &(f64, f64)| if *all > 0.0 { (far / all) as f32 } else { 0.0 };
    Ok(watched.watch.0.iter().map(|heads| heads.iter().map(share).collect()).collect())
}

/// Distant attention and all attention, `[layers][kv_heads]`.
struct Sums(Vec<Vec<(f64, f64)>>);

impl Watch for Sums {
    fn layer(&self, _: usize) -> bool {
        true
    }

    fn mass(&mut self, layer: usize, _: u32, mass: &[PageMass]) {
        for page in mass {
            let (far, all) = &mut self.0[layer][page.kv_head];
            let total = f64::from(page.total());
            *all += total;
            if matches!(page.page.place, Place::Run(_)) {
                *far += total;
            }
        }
    }
}
