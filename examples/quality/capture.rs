//! Keys, values and queries of a run of the model, to fit codecs and measure the error of stored pages.

use crate::rows::Row;
use pikv::codec::{FitShape, Fitter};
use pikv::{Cache, CacheConfig, Dtype};
use pikv_engine::common::cache::{Cache as AnyCache, Keys, Step as AnyStep};
use pikv_engine::measure::subject::Subject;
use pikv_engine::moe::paged::Paged;
use std::error::Error;

/// Tokens whose keys and values are kept.
const KEPT: usize = 1024;

/// Energy of the error and of the original, for each KV head.
type Energies = Vec<(f64, f64)>;

pub struct Capture {
    pub fitter: Fitter,
    keys: Keys,
    /// `[token][kv_head][head_dim]` for each layer.
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

impl Capture {
    /// Runs the model over `ids`, window by window.
    pub fn run(subject: &mut Subject, keys: Keys, ids: &[u32]) -> Result<Capture, Box<dyn Error>> {
        let shape = FitShape::new(
            subject.layers as u32,
            subject.kv_heads as u32,
            subject.query_heads as u32,
            subject.head_dim as u32,
        );
        let fitter = Fitter::new(shape)?.sample(8, 128, 1);
        let none = vec![Vec::new(); subject.layers];
        let mut capture = Capture { fitter, keys, k: none.clone(), v: none };
        subject.keys(keys);
        let layers = vec![subject.layer(Dtype::F32, keys); subject.layers];
        let (experts, top_k) = subject.experts;
        let config = CacheConfig::new(layers, 4 << 30).ring(subject.window() as u32).experts(experts, top_k);
        let mut paged = Paged::new(Cache::new(config)?, subject.head_dim);
        let mut logits = Vec::new();
        for window in ids.chunks(subject.window()) {
            paged.clear();
            for ids in window.chunks(256) {
                subject.forward(ids, &mut Watched(&mut paged, &mut capture), &mut logits)?;
            }
        }
        Ok(capture)
    }

    /// Relative error of a row's codecs on packed tokens, over all channels of all keys and values.
    pub fn error(&self, row: &Row, subject: &Subject) -> Result<f64, Box<dyn Error>> {
        let errors = self.errors(row, subject)?;
        let (wrong, all) = errors.iter().flatten().fold((0.0, 0.0), |(w, a), e| (w + e.0, a + e.1));
        Ok((wrong / all).sqrt())
    }

    /// Energy of the error and of the original, for every layer and head.
    pub fn errors(&self, row: &Row, subject: &Subject) -> Result<Vec<Energies>, Box<dyn Error>> {
        let (heads, dim) = (subject.kv_heads, subject.head_dim);
        let layers = vec![subject.layer(row.dtype, Keys::Rotated); subject.layers];
        let cache = Cache::new(row.compress(CacheConfig::new(layers, 4 << 30).ring(32)))?;
        let mut sequence = cache.sequence();
        for at in (0..KEPT).step_by(32) {
            let mut step = cache.begin([(&mut sequence, 32)])?;
            for layer in 0..subject.layers {
                let rows = at * heads * dim..(at + 32) * heads * dim;
                step.append(layer, &self.k[layer][rows.clone()], &self.v[layer][rows])?;
            }
            step.commit()?;
        }
        let (mut key, mut value) = (vec![0.0; dim], vec![0.0; dim]);
        let mut errors = vec![vec![(0.0, 0.0); heads]; subject.layers];
        for (layer, errors) in errors.iter_mut().enumerate() {
            for (head, (wrong, all)) in errors.iter_mut().enumerate() {
                for page in
                    sequence.pages(layer, head)?.filter(|page| page.id.place != pikv::report::Place::Ring)
                {
                    for lane in 0..page.tokens {
                        let p = sequence.read(layer, head, page.id, lane, &mut key, &mut value)?;
                        let row = (p.0 as usize * heads + head) * dim;
                        let (k, v) = (&self.k[layer][row..row + dim], &self.v[layer][row..row + dim]);
                        for (was, is) in k.iter().zip(&key).chain(v.iter().zip(&value)) {
                            let (was, is) = (f64::from(*was), f64::from(*is));
                            *wrong += (was - is) * (was - is);
                            *all += was * was;
                        }
                    }
                }
            }
        }
        Ok(errors)
    }

    pub fn keys(&self) -> Keys {
        self.keys
    }
}

/// A cache that passes its input to a capture.
struct Watched<'a>(&'a mut Paged, &'a mut Capture);

struct WatchedStep<'a>(<Paged as AnyCache>::Step<'a>, &'a mut Capture);

impl AnyCache for Watched<'_> {
    type Error = pikv::Error;
    type Step<'a>
        = WatchedStep<'a>
    where
        Self: 'a;

    fn begin(&mut self, n: usize) -> Result<WatchedStep<'_>, pikv::Error> {
        Ok(WatchedStep(self.0.begin(n)?, self.1))
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

impl AnyStep for WatchedStep<'_> {
    type Error = pikv::Error;

    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), pikv::Error> {
        // The cache rejects the input that the fitter would reject.
        self.0.layer(layer, q, k, v, out)?;
        let capture = &mut *self.1;
        capture.fitter.observe(layer as u32, q, k, v).expect("finite rows of the fitter's shape");
        if capture.k[layer].len() < KEPT * k.len() {
            capture.k[layer].extend_from_slice(k);
            capture.v[layer].extend_from_slice(v);
        }
        Ok(())
    }

    fn experts(&mut self, layer: usize, experts: &[u16]) -> Result<(), pikv::Error> {
        self.0.experts(layer, experts)
    }

    fn commit(self) -> Result<(), pikv::Error> {
        self.0.commit()
    }
}
