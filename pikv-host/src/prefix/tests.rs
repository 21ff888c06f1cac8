//! Tests with colliding names, which cannot be produced with a keyed hash of 256 bits.

use super::{PrefixIndex, PrefixScope};
use crate::cache::Cache;
use crate::cache::sequence::Sequence;
use crate::config::CacheConfig;
use pikv_core::dtype::Dtype;
use pikv_core::plan::LayerShape;
use std::cell::Cell;

thread_local! {
    static WEAK: Cell<bool> = const { Cell::new(false) };
}

/// Whether names depend only on the number of tokens.
pub(super) fn weak() -> bool {
    WEAK.get()
}

fn computed(cache: &Cache, tokens: &[u32]) -> Sequence {
    let mut sequence = cache.sequence();
    let mut step = cache.begin([(&mut sequence, tokens.len() as u32)]).unwrap();
    let rows: Vec<f32> = tokens.iter().map(|token| *token as f32).collect();
    step.append(0, &rows, &rows).unwrap();
    step.commit().unwrap();
    sequence
}

#[test]
fn tokens_are_compared_where_names_are_equal() {
    WEAK.set(true);
    let cache = Cache::new(CacheConfig::new(vec![LayerShape::new(1, 1, 1, Dtype::F32)], 1 << 20)).unwrap();
    let index = PrefixIndex::new(&cache, 1 << 20);
    let scope = PrefixScope::new(b"all");
    let (one, other): (Vec<u32>, Vec<u32>) = ((0..100).collect(), (1000..1100).collect());
    assert_eq!(index.publish(&scope, &one, &mut computed(&cache, &one)), Ok(96));
    assert_eq!(index.find(&scope, &other).unwrap().len, 0);
    assert_eq!(index.publish(&scope, &other, &mut computed(&cache, &other)), Ok(0));
    // The first 64 tokens are known.
    let mixed = [&one[..64], &other[64..]].concat();
    assert_eq!(index.find(&scope, &mixed).unwrap().len, 64);
    assert_eq!(index.find(&scope, &one).unwrap().len, 96);
    assert!(index.usage().unequal > 0);
    WEAK.set(false);
}
