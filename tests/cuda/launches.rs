//! How many launches a step takes, whatever its tokens.

use crate::standin::{Get, Set, Standin};
use crate::suite::shape;
use crate::tensors::Loop;
use pikv::codec::{Code, Codec, Coding};
use pikv::cuda::{DeviceOutput, DeviceSlice};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::{Attend, CacheConfig, Dtype};

/// Tokens of a step while a sequence is filled.
const FILL: u32 = 512;

/// A step of `rows` tokens in a cache of one layer, which attends if `attends`.
fn step(run: &mut Loop, rows: u32, attends: bool) {
    let Loop { cache, sequence, tensors, .. } = run;
    let part = |of: DeviceSlice| {
        let len = of.len() / FILL as usize * rows as usize;
        // SAFETY: the first rows of a tensor, which stays, and nobody else writes it.
        unsafe { DeviceSlice::new(of.address(), len, of.dtype()) }
    };
    let [k, v, q, out, _] = tensors[0].map(part);
    let mut step = cache.begin([(sequence, rows)]).unwrap();
    step.append_device(0, k, v).unwrap();
    if attends {
        step.attend_device(0, q, &Attend::new(0.3), DeviceOutput::new(out)).unwrap();
    }
    step.commit().unwrap();
}

/// The most launches of one of 40 steps of a token, after `context` others. If it only counts, no kernel runs.
fn launches(change: impl FnOnce(CacheConfig) -> CacheConfig, context: u32, only_counts: bool) -> u64 {
    let standin = Standin::new();
    let backend = standin.backend();
    standin.set(Set::Count, only_counts.into());
    let layer = shape(2, 4, 16, 16, Dtype::Bf16, Dtype::Bf16);
    let config = change(CacheConfig::new(vec![layer], 1 << 30));
    let mut run = Loop::of(config, &backend, FILL, [Dtype::F32; 4]);
    (0..context / FILL).for_each(|_| step(&mut run, FILL, false));
    let launches = |_| {
        let before = standin.get(Get::Launched);
        step(&mut run, 1, true);
        standin.get(Get::Launched) - before
    };
    (0..40).map(launches).max().unwrap()
}

#[test]
fn a_step_takes_four_launches_a_layer_at_any_length() {
    for context in [FILL, 8 * FILL, 128 * FILL] {
        // Writes with the tokens that leave the ring, queries, blocks, and the trees with the outputs.
        assert_eq!(launches(|config| config, context, true), 4, "{context} tokens");
    }
}

#[test]
fn codecs_and_policies_take_as_many_more_at_any_length() {
    let codec = || Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8));
    for context in [FILL, 32 * FILL] {
        // Queries are folded through the codec, packed blocks are attended, and in some steps full pages are packed.
        let packed = |config: CacheConfig| config.compress_layer(0, codec());
        assert_eq!(launches(packed, context, true), 7, "{context} tokens");
    }
    for context in [FILL, 4 * FILL] {
        // The weights of pages are summed; the host reads them at commit.
        let h2o = |config: CacheConfig| config.evict(Eviction::new(H2o, Budget::Tokens(8 * context)));
        assert_eq!(launches(h2o, context, false), 5, "{context} tokens");
    }
}
