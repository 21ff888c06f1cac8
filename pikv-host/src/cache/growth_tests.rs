//! Tests of memory that is cleared before steps need it.

use crate::{Cache, CacheConfig, Sequence};
use pikv_core::dtype::Dtype;
use pikv_core::plan::LayerShape;

const LAYERS: usize = 4;
const HEADS: u32 = 4;

/// Pages of 16 KiB.
fn cache(budget: u64) -> Cache {
    let layer = LayerShape::new(HEADS, HEADS, 128, Dtype::Bf16);
    Cache::new(CacheConfig::new(vec![layer; LAYERS], budget)).expect("a configuration")
}

fn step(cache: &Cache, sequences: &mut [Sequence]) -> Result<(), crate::Error> {
    let rows = vec![0.5; sequences.len() * HEADS as usize * 128];
    let mut step = cache.begin(sequences.iter_mut().map(|sequence| (sequence, 1)))?;
    (0..LAYERS).try_for_each(|layer| step.append(layer, &rows, &rows))?;
    step.commit()
}

/// Runs `test` with one thread, so that memory is cleared on the thread that commits.
fn alone(test: impl FnOnce() + Send) {
    #[cfg(feature = "rayon")]
    rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread").install(test);
    #[cfg(not(feature = "rayon"))]
    test();
}

#[test]
fn steps_that_open_pages_find_them_free() {
    alone(|| {
        let cache = cache(1 << 30);
        let free = || cache.inner.pool.arenas.size(0, 0).free();
        let mut sequences: Vec<Sequence> = (0..8).map(|_| cache.sequence()).collect();
        let heads = 8 * LAYERS as u64 * u64::from(HEADS);
        for token in 0..1000 {
            if token >= 32 && token % 32 == 0 {
                assert!(free() >= 2 * heads, "{} pages of {heads} heads are free at {token} tokens", free());
            }
            step(&cache, &mut sequences).expect("a step");
        }
        // At most two pages a head for the next steps, an eighth of the used pages, and the rest of a chunk.
        let used = cache.usage().taken / (16 << 10);
        assert!(free() <= used / 8 + 2 * heads + 2 * 128, "{} pages are free beside {used}", free());
        sequences.clear();
        assert!(free() <= 2 * 128, "{} pages are kept though none is used", free());
    });
}

#[test]
fn memory_that_is_cleared_ahead_stays_within_the_budget() {
    alone(|| {
        let budget = 24 << 20;
        let cache = cache(budget);
        // All heads together may need 16 MiB in one step.
        let mut sequences: Vec<Sequence> = (0..32).map(|_| cache.sequence()).collect();
        let mut tokens = 0;
        while step(&cache, &mut sequences).is_ok() {
            tokens += 1;
            let free = cache.inner.pool.arenas.size(0, 0).free();
            let held = cache.usage().taken + free * (16 << 10);
            // Runs of pages take up to an eighth more, and a chunk is allocated whole.
            assert!(held <= budget + budget / 8 + (4 << 20), "{held} bytes at {tokens} tokens");
        }
        assert_eq!(tokens, 64);
    });
}
