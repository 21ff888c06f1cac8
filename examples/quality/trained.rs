//! Rows whose maps are trained by gradient against the attention of the model's own keys, head by head.

use crate::capture::Capture;
use crate::rows::{Row, each};
use indicatif::ProgressBar;
use pikv::codec::{
    Code, Codec, Coding, Distil, FitShape, Fitted, Map, PeftConfig, PeftUse, distil, fit_lora_plus, svd,
};
use pikv_engine::common::cache::Keys;
use pikv_engine::common::sample::SplitMix;
use pikv_engine::measure::subject::Subject;
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// C_Dis started from low rank with bias, for K, and from SVD, for K and V; C_Lo started without a fit.
pub fn rows(subject: &Subject, plain: &Capture, bar: &ProgressBar) -> Result<Vec<Row>> {
    let dim = subject.head_dim as u32;
    let (half, most) = (dim / 2, dim / 4 * 3);
    let whole = Map::identity_subset(dim, &(0..dim).collect::<Vec<u32>>())?;
    let train = |l: u32, h: u32, k: &Map, v: &Map, steps: u32| {
        bar.set_message(format!("training layer {l}, KV head {h}"));
        bar.tick();
        let options = Distil::default().steps(steps).scale(1.0 / f64::from(dim).sqrt()).rope(subject.rope);
        Ok::<_, Box<dyn Error>>(distil(&plain.fitter.segments(l, h)?, k, v, &options, |_, _| ())?)
    };
    let bf16 = || Coding::new(Code::Bf16);
    let int8 = || Coding::new(Code::Int8);
    let keys = each(subject, |l, h| {
        let start = fit_lora_plus(plain.fitter.k(l, h)?, half)?.map;
        Ok(Codec::new(bf16().map(train(l, h, &start, &whole, 150)?.k), bf16()))
    })?;
    let both = each(subject, |l, h| {
        let k = svd(plain.fitter.k(l, h)?, half)?.map;
        let v = svd(plain.fitter.v(l, h)?, most)?.map;
        let found = train(l, h, &k, &v, 150)?;
        Ok(Codec::new(int8().map(found.k), int8().map(found.v)))
    })?;
    let mut random = SplitMix(11);
    let mut found = Vec::new();
    for l in 0..subject.layers as u32 {
        for h in 0..subject.kv_heads as u32 {
            found.push(train(l, h, &start(dim, half, &mut random)?, &whole, 600)?.k);
        }
    }
    let fitted = adapter(subject, &found, half)?;
    let side = fitted.k().ok_or("an adapter of keys")?;
    let given = each(subject, |l, h| {
        let at = l as usize * subject.kv_heads + h as usize;
        Ok(Codec::new(bf16().map(side.maps[at].clone()), bf16()))
    })?;
    let before = Keys::Unrotated;
    Ok(vec![
        Row::new("C_Dis", "distilled, 1/2 of K", "1/2", before, keys),
        Row::new("C_Dis", "distilled, 1/2 of K and 3/4 of V, int8", "5/8", before, both),
        Row::new("C_Lo", "projector trained from noise, by a PEFT file, 1/2 of K", "1/2", before, given),
    ])
}

/// A projector to a random subspace, near enough to orthogonal: E, and its transpose.
fn start(wide: u32, narrow: u32, random: &mut SplitMix) -> Result<Map> {
    let (wide_, narrow_) = (wide as usize, narrow as usize);
    // Uniform in -a..a has the variance a^2 / 3.
    let a = (3.0 / f64::from(wide)).sqrt();
    let down: Vec<f32> = (0..wide_ * narrow_).map(|_| (a * (2.0 * random.unit() - 1.0)) as f32).collect();
    let up = (0..wide_ * narrow_).map(|i| down[i % narrow_ * wide_ + i / narrow_]).collect();
    Ok(Map::new(wide, narrow, down, up, None)?)
}

/// The maps as an adapter that reconstructs keys, written in PEFT's form and read again: A is `[rank][heads * wide]`, B is
/// `[heads * wide][rank]`.
fn adapter(subject: &Subject, maps: &[Map], rank: u32) -> Result<Fitted> {
    let (heads, wide, rank) = (subject.kv_heads, subject.head_dim, rank as usize);
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (l, maps) in maps.chunks_exact(heads).enumerate() {
        let bytes = |of: &mut dyn Iterator<Item = f32>| of.flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        let a =
            (0..rank).flat_map(|r| maps.iter().flat_map(move |m| m.encode()[r * wide..][..wide].to_vec()));
        let b = maps.iter().flat_map(|m| m.decode().into_owned());
        let name = |of: &str| format!("base_model.model.model.layers.{l}.self_attn.k_proj.lora_{of}.weight");
        tensors.push((name("A"), vec![rank, heads * wide], bytes(&mut a.into_iter())));
        tensors.push((name("B"), vec![heads * wide, rank], bytes(&mut b.into_iter())));
    }
    let views: std::result::Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, shape, bytes)| {
            TensorView::new(Dtype::F32, shape.clone(), bytes).map(|view| (name.clone(), view))
        })
        .collect();
    let file = serialize(views?, None)?;
    let (layers, kv_heads) = (subject.layers as u32, heads as u32);
    let shape = FitShape::new(layers, kv_heads, subject.query_heads as u32, wide as u32);
    let config = PeftConfig::new(rank as u32, rank as f32);
    Ok(Fitted::from_peft(&file, config, PeftUse::Reconstruction, shape, subject.name())?)
}
