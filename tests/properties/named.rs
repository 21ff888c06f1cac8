//! Policies by name, for tests that choose them at random.

use pikv::Rope;
use pikv::policy::{
    AdaKvLit, Budget, Chunks, DuoLit, Eviction, ExpectedAttention, FastVReceived, H2o, KeyNorm, Lru, LruPlus,
    SnapKv, StreamingLlm, Tova,
};
use std::num::NonZeroU32;

pub const POLICIES: [&str; 14] = [
    "LRU",
    "LRU+",
    "H2O",
    "StreamingLLM",
    "SnapKV",
    "TOVA",
    "key norm",
    "FastV",
    "DuoLit",
    "ChunkKV",
    "AdaKV-lit",
    "H2O by page",
    "H2O shared",
    "expected",
];

/// An eviction rule by the policy's name; `rope` is the rotation of keys that are stored before it.
pub fn eviction(policy: &str, budget: Budget, rope: Option<Rope>) -> Eviction {
    match policy {
        "LRU" => Eviction::new(Lru::default(), budget),
        "LRU+" => Eviction::new(LruPlus::default(), budget),
        "H2O" => Eviction::new(H2o, budget),
        "StreamingLLM" => Eviction::new(StreamingLlm, budget),
        "SnapKV" => Eviction::new(SnapKv::default().window(8), budget),
        "TOVA" => Eviction::new(Tova, budget),
        "key norm" => Eviction::new(KeyNorm, budget),
        "FastV" => Eviction::new(FastVReceived, budget),
        "DuoLit" => Eviction::new(DuoLit, budget),
        "ChunkKV" => Eviction::new(
            Chunks::new(SnapKv::default().window(8).pool(1), NonZeroU32::new(5).unwrap()),
            budget,
        ),
        "AdaKV-lit" => Eviction::new(AdaKvLit::default(), budget),
        "H2O by page" => Eviction::new(H2o, budget).by_page(),
        "H2O shared" => Eviction::new(H2o, budget).adaptive(0.5),
        "expected" => Eviction::new(ExpectedAttention::new(rope, false), budget),
        other => unreachable!("{other}"),
    }
}
