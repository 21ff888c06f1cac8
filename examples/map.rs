//! Draws the pages of a sequence that has read a chapter: [`pikv::Sequence::map`].
//!
//! ```sh
//! cargo run --release -p pikv-examples --bin map > map.svg
//! ```
//!
//! The MoE of this repository reads 2,048 bytes of a novel. The newest tokens stay in the ring; older ones are filed by expert and packed
//! as int8; H2O keeps 1,024 tokens of each head outside the ring; at the end, 384 KiB of pages move down to host memory. The drawing goes
//! to standard output, the counts of pages and bytes to standard error.

use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::report::StorageForm;
use pikv::tiers::Tiers;
use pikv::{Cache, CacheConfig, Dtype, LayerShape};
use pikv_engine::moe::model::{Config, Model};
use pikv_engine::moe::paged::Paged;

/// Bytes of the novel, and bytes of a step.
const TOKENS: usize = 2048;
const CHUNK: usize = 128;
/// Bytes of pages that move down at the end.
const DOWN: u64 = 384 << 10;

fn config(c: &Config) -> CacheConfig {
    let int8 = Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8));
    let layer = LayerShape::new(c.kv_heads as u32, c.query_heads as u32, c.head_dim as u32, Dtype::Bf16);
    CacheConfig::new(vec![layer; c.layers], 64 << 20)
        .ring(256)
        .sinks(32)
        .experts(c.experts as u32, c.top_k as u32)
        .compress(int8)
        .evict(Eviction::new(H2o, Budget::Tokens(1024)))
        .tiers(Tiers::new().host(16 << 20))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(&pikv_engine::example("models/austen-moe"))?;
    let text = std::fs::read(pikv_engine::example("text/northangerabbey.txt"))?;
    let mut paged = Paged::new(Cache::new(config(model.config()))?, model.config().head_dim);
    let mut logits = Vec::new();
    for chunk in text[..TOKENS].chunks(CHUNK) {
        model.forward(chunk, &mut paged, &mut logits)?;
    }
    paged.sequence.demote(DOWN)?;

    let map = paged.sequence.map();
    for form in StorageForm::ALL {
        let (pages, bytes) = map.count(form);
        eprintln!("{form:?}: {pages} pages, {bytes} bytes");
    }
    print!("{}", map.svg());
    Ok(())
}
