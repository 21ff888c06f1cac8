//! How far each KV head looks, for Duo's gates.

use crate::common::cache::{Cache as AnyCache, Step as AnyStep};
use crate::measure::subject::Subject;
use crate::{Keys, SINKS};
use pikv::{Attend, Cache, CacheConfig, Dtype, Output, PageMass, Place, Sequence};
use std::error::Error;

/// Tokens that are near.
const NEAR: u32 = 128;

/// `[layers][kv_heads]`: the share of the attention that goes neither to the sinks nor to what is near, over `ids`.
pub fn far(subject: &Subject, ids: &[u32]) -> Result<Vec<Vec<f32>>, Box<dyn Error>> {
    let layers = vec![subject.layer(Dtype::Bf16, Keys::Rotated); subject.layers];
    let cache = Cache::new(CacheConfig::new(layers, 4 << 30).ring(NEAR).sinks(SINKS))?;
    let mut watched = Watched {
        sequence: cache.sequence(),
        cache,
        attend: Attend::new(1.0 / (subject.head_dim as f32).sqrt()),
        sums: vec![vec![(0.0, 0.0); subject.kv_heads]; subject.layers],
    };
    let mut logits = Vec::new();
    for ids in ids.chunks(NEAR as usize) {
        subject.forward(ids, &mut watched, &mut logits)?;
    }
    let share = |(far, all): &(f64, f64)| if *all > 0.0 { (far / all) as f32 } else { 0.0 };
    Ok(watched.sums.iter().map(|heads| heads.iter().map(share).collect()).collect())
}

struct Watched {
    cache: Cache,
    sequence: Sequence,
    attend: Attend,
    /// Far and all.
    sums: Vec<Vec<(f64, f64)>>,
}

struct Step<'a>(pikv::Step<'a>, Attend, &'a mut Vec<Vec<(f64, f64)>>);

impl AnyCache for Watched {
    type Error = pikv::Error;
    type Step<'a> = Step<'a>;

    fn begin(&mut self, n: usize) -> Result<Step<'_>, pikv::Error> {
        Ok(Step(self.cache.begin([(&mut self.sequence, n as u32)])?, self.attend, &mut self.sums))
    }

    fn len(&self) -> usize {
        self.sequence.next_position().0 as usize
    }

    fn clear(&mut self) {
        self.sequence.clear();
    }
}

impl AnyStep for Step<'_> {
    type Error = pikv::Error;

    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), pikv::Error> {
        self.0.append(layer, k, v)?;
        let mut mass: Vec<PageMass> = Vec::new();
        self.0.attend(layer, q, &self.1, Output::new(out).mass(&mut mass))?;
        for page in mass {
            let (far, all) = &mut self.2[layer][page.kv_head];
            let total = f64::from(page.total());
            *all += total;
            if matches!(page.page.place, Place::Expert(_)) {
                *far += total;
            }
        }
        Ok(())
    }

    fn experts(&mut self, _: usize, _: &[u16]) -> Result<(), pikv::Error> {
        Ok(())
    }

    fn commit(self) -> Result<(), pikv::Error> {
        self.0.commit()
    }
}
