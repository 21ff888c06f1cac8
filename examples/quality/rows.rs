//! The rows of the table: all forms of packing in the store.

use crate::capture::Capture;
use crate::codes::CHUNK;
use crate::trained;
use indicatif::ProgressBar;
use pikv::codec::{
    Code, Codec, Coding, Cost, CropBy, HeadCodings, Map, crop, fit_lora_plus, hybrid, lora, svd, think,
};
use pikv::policy::{Budget, Chunks, Eviction, PyramidKv, SnapKv, fast_v};
use pikv::{CacheConfig, Dtype};
use pikv_engine::common::cache::Keys;
use pikv_engine::llama::rounding::Rounding;
use pikv_engine::measure::subject::Subject;
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Most heads of a distilled model: each takes seconds to fit.
const DISTILLED: usize = 16;

#[derive(Clone)]
pub struct Row {
    pub id: &'static str,
    pub name: String,
    /// Part of a row's channels that is stored.
    pub budget: String,
    pub k: String,
    pub v: String,
    pub dtype: Dtype,
    pub keys: Keys,
    /// `[layer][kv_head]`; empty if nothing is packed.
    pub codecs: Vec<Vec<Codec>>,
    /// Number of tokens after which every head's packed pages are aged, and the codec that packs them again.
    pub age: Option<(u32, Codec)>,
    /// Layers that drop tokens, and how.
    pub drops: Vec<(usize, Eviction)>,
    /// Forms of llama.cpp that K and V are rounded to before they are stored.
    pub rounded: Option<[Rounding; 2]>,
    /// Tokens of a prefill step, and of the ring.
    pub ring: usize,
    /// Whether tokens are filed by the expert that the model chose; if not, all under one.
    pub by_expert: bool,
}

impl Row {
    pub fn new(
        id: &'static str,
        name: impl Into<String>,
        budget: &str,
        keys: Keys,
        codecs: Vec<Vec<Codec>>,
    ) -> Row {
        let code = |pick: fn(&Codec) -> &Coding| match codecs.first().and_then(|heads| heads.first()) {
            Some(codec) => pick(codec).code().name().to_owned(),
            None => "bf16".to_owned(),
        };
        let (k, v) = (code(|c| &c.k), code(|c| &c.v));
        Row {
            id,
            name: name.into(),
            budget: budget.into(),
            k,
            v,
            dtype: Dtype::Bf16,
            keys,
            codecs,
            age: None,
            drops: vec![],
            rounded: None,
            ring: crate::RING,
            by_expert: true,
        }
    }

    pub fn compress(&self, mut config: CacheConfig) -> CacheConfig {
        for (layer, heads) in self.codecs.iter().enumerate() {
            for (head, codec) in heads.iter().enumerate() {
                config = config.compress_head(layer, head, codec.clone());
            }
        }
        if let Some((after, codec)) = &self.age {
            config = config.age(*after, codec.clone());
        }
        config
    }

    /// This row with tokens dropped by layers.
    pub fn drop(&self, config: CacheConfig) -> CacheConfig {
        self.drops.iter().fold(config, |config, (layer, how)| config.evict_layer(*layer, how.clone()))
    }

    /// bf16 bytes over packed bytes of a token, at any age.
    pub fn ratio(&self, subject: &Subject) -> f64 {
        let dim = subject.head_dim as u32;
        if let Some(forms) = self.rounded {
            let bytes: usize = forms.iter().map(|form| form.bytes(dim as usize)).sum();
            return f64::from(2 * 2 * dim) / bytes as f64;
        }
        let heads = self.codecs.iter().flatten();
        let shares: Vec<f64> = heads.map(|codec| 1.0 / codec.ratio(dim, dim)).collect();
        match shares.len() {
            0 => 16.0 / f64::from(self.dtype.bits()),
            n => n as f64 / shares.iter().sum::<f64>(),
        }
    }
}

/// A codec for every head.
pub fn each(subject: &Subject, mut make: impl FnMut(u32, u32) -> Result<Codec>) -> Result<Vec<Vec<Codec>>> {
    let layer = |l: u32| (0..subject.kv_heads as u32).map(|h| make(l, h)).collect();
    (0..subject.layers as u32).map(layer).collect()
}

/// Whether a model has few enough heads for fits and measurements head by head.
pub fn small(subject: &Subject) -> bool {
    subject.layers * subject.kv_heads <= DISTILLED
}

/// K after a Hadamard transform, and V, in int4.
pub fn int4(subject: &Subject) -> Result<Vec<Vec<Codec>>> {
    let dim = subject.head_dim as u32;
    each(subject, |_, _| {
        let turned = Coding::new(Code::Int4).map(Map::hadamard(dim)?);
        Ok(Codec::new(turned, Coding::new(Code::Int4)))
    })
}

/// Bytes and error of each of `options`, for each head.
fn costs(subject: &Subject, of: &Capture, options: &[(&str, Vec<Vec<Codec>>)]) -> Result<Vec<Vec<Cost>>> {
    let dim = subject.head_dim as u32;
    let mut heads: Vec<Vec<Cost>> = vec![Vec::new(); subject.layers * subject.kv_heads];
    for (name, codecs) in options {
        let row = Row::new("C_Hy", *name, "1", Keys::Rotated, codecs.clone());
        let errors = of.errors(&row, subject)?;
        for (i, (error, codec)) in errors.iter().flatten().zip(codecs.iter().flatten()).enumerate() {
            heads[i].push(Cost::new(codec.packed(dim, dim).bytes(), error.0 / error.1));
        }
    }
    Ok(heads)
}

/// The option for each head, of `options` with costs `heads`, within a budget of bytes.
fn by_head(
    subject: &Subject,
    options: &[(&str, Vec<Vec<Codec>>)],
    heads: &[Vec<Cost>],
    importance: &[f64],
    budget: u64,
) -> Result<Vec<Vec<Codec>>> {
    let heads = importance.iter().zip(heads).map(|(of, codings)| HeadCodings::new(*of, codings.clone()));
    let chosen = hybrid(&heads.collect::<Vec<_>>(), budget)?.chosen;
    each(subject, |l, h| {
        let head = l as usize * subject.kv_heads + h as usize;
        Ok(options[chosen[head]].1[l as usize][h as usize].clone())
    })
}

/// All rows; the first is f32 and nothing packed. Fits the trained ones if `distils`, as that takes longest. `importance` is the
/// cost of each head's relative error, per unit.
pub fn rows(
    subject: &Subject,
    rotated: &Capture,
    plain: &Capture,
    distils: bool,
    importance: Option<&[f64]>,
    bar: &ProgressBar,
) -> Result<Vec<Row>> {
    let dim = subject.head_dim as u32;
    let (half, most) = (dim / 2, dim / 4 * 3);
    let code = |k, v| each(subject, |_, _| Ok(Codec::new(Coding::new(k), Coding::new(v))));
    let turned = |code| Ok::<_, Box<dyn Error>>(Coding::new(code).map(Map::hadamard(dim)?));
    let bf16 = || Coding::new(Code::Bf16);
    let (after, before) = (Keys::Rotated, Keys::Unrotated);
    let mut rows = vec![
        Row {
            dtype: Dtype::F32,
            k: "f32".into(),
            v: "f32".into(),
            ..Row::new("-", "f32", "1", after, vec![])
        },
        Row::new("-", "bf16", "1", after, vec![]),
        Row::new("C_Q", "int8", "1", after, code(Code::Int8, Code::Int8)?),
        Row::new("C_Q", "int8 K before rotation", "1", before, code(Code::Int8, Code::Int8)?),
        Row::new("C_Q", "int8 K int4 V", "1", after, code(Code::Int8, Code::Int4)?),
        Row::new("C_Q", "int4", "1", after, code(Code::Int4, Code::Int4)?),
        Row::new("C_Q", "int4 K before rotation", "1", before, code(Code::Int4, Code::Int4)?),
    ];
    let hadamard = int4(subject)?;
    rows.push(Row::new("C_Q", "int4 Hadamard K", "1", after, hadamard.clone()));
    let both = each(subject, |_, _| Ok(Codec::new(turned(Code::Int4)?, turned(Code::Int4)?)))?;
    rows.push(Row::new("C_Q", "int4 Hadamard K and V", "1", after, both));
    rows.push(Row::new("C_fp8", "e4m3", "1", after, code(Code::E4m3, Code::E4m3)?));
    rows.push(Row::new("C_fp8", "e5m2", "1", after, code(Code::E5m2, Code::E5m2)?));

    bar.set_message("fitting: low ranks");
    let k = |of: &Capture, l, h, r| Ok::<_, Box<dyn Error>>(svd(of.fitter.k(l, h)?, r)?.map);
    let v = |l, h, r| Ok::<_, Box<dyn Error>>(svd(rotated.fitter.v(l, h)?, r)?.map);
    for (share, r) in [("1/2", half), ("3/4", most)] {
        let low = each(subject, |l, h| Ok(Codec::new(bf16().map(k(plain, l, h, r)?), bf16())))?;
        rows.push(Row::new("C_SVD", format!("SVD {share} of K before rotation"), share, before, low));
    }
    let low = each(subject, |l, h| Ok(Codec::new(bf16().map(k(rotated, l, h, most)?), bf16())))?;
    rows.push(Row::new("C_SVD", "SVD 3/4 of rotated K", "3/4", after, low));
    let low = each(subject, |l, h| Ok(Codec::new(bf16(), bf16().map(v(l, h, most)?))))?;
    rows.push(Row::new("C_SVD", "SVD 3/4 of V", "3/4", after, low));
    let low = each(subject, |l, h| {
        let (k, v) = (k(plain, l, h, half)?, v(l, h, most)?);
        Ok(Codec::new(Coding::new(Code::Int8).map(k), Coding::new(Code::Int8).map(v)))
    })?;
    rows.push(Row::new("C_SVD", "SVD 1/2 K 3/4 V in int8", "5/8", before, low));
    let given = each(subject, |l, h| {
        let map = k(plain, l, h, half)?;
        let (down, up) = (map.encode().into_owned(), map.decode().into_owned());
        Ok(Codec::new(bf16().map(lora(dim, half, down, up)?), bf16()))
    })?;
    rows.push(Row::new("C_Lo", "given projector, 1/2 of K", "1/2", before, given));
    let plus = each(subject, |l, h| {
        Ok(Codec::new(bf16().map(fit_lora_plus(plain.fitter.k(l, h)?, half)?.map), bf16()))
    })?;
    rows.push(Row::new("C_Lo+", "rank and bias, 1/2 of K", "1/2", before, plus));
    for (name, by) in [("first", CropBy::First), ("by energy", CropBy::Energy)] {
        let cut = each(subject, |l, h| {
            let energy = rotated.fitter.k(l, h)?.mean_squares();
            Ok(Codec::new(bf16().map(crop(&energy, Some(subject.rope), most, by)?.map), bf16()))
        })?;
        rows.push(Row::new("C_F-lit", format!("crop {name}, 3/4 of K"), "3/4", after, cut));
    }
    let pruned = each(subject, |l, h| {
        let (q, k) = (rotated.fitter.q(l, h)?.mean_squares(), rotated.fitter.k(l, h)?.mean_squares());
        Ok(Codec::new(bf16().map(think(&q, &k, Some(subject.rope), most)?.map), bf16()))
    })?;
    rows.push(Row::new("C_Pr", "ThinK, 3/4 of K", "3/4", after, pruned));

    if distils && small(subject) {
        rows.extend(trained::rows(subject, plain, bar)?);
    }

    // Between int4 and int8, head by head, in the bytes that lie half-way; and among three, in int4's.
    let options = [("int4", hadamard.clone()), ("int8", code(Code::Int8, Code::Int8)?)];
    let two = each(subject, |_, _| Ok(Codec::new(turned(Code::Int2)?, Coding::new(Code::Int2))))?;
    let three = [("int2", two), ("int4", hadamard), options[1].clone()];
    let heads = costs(subject, rotated, &options)?;
    let of_three = costs(subject, rotated, &three)?;
    let bytes = |i: usize| heads.iter().map(|costs| costs[i].bytes).sum::<u64>();
    let budget = (bytes(0) + bytes(1)) / 2;
    let mixed = by_head(subject, &options, &heads, &vec![1.0; heads.len()], budget)?;
    rows.push(Row {
        k: "mixed".into(),
        v: "mixed".into(),
        ..Row::new("C_Hy", "int8 or int4 by head", "1", after, mixed)
    });
    let both = |coding: Coding| each(subject, |_, _| Ok(Codec::new(coding.clone(), coding.clone())));
    let (shares, name) = ([7u32, 15], |r: u32, rest: &str| format!("block PCA, {r} a page, int8{rest}"));
    for r in shares {
        let pca = both(Coding::block_pca(Code::Int8, r)?)?;
        rows.push(Row::new("C_Ch-lit", name(r, ", K before rotation"), &format!("{r}/{dim}"), before, pca));
    }
    let pca = both(Coding::block_pca(Code::Int8, 7)?)?;
    rows.push(Row::new("C_Ch-lit", name(7, ""), &format!("7/{dim}"), after, pca));
    for (level, share) in [(1, "1/2"), (2, "1/4")] {
        let name = format!("means of {}, K before rotation", 1 << level);
        rows.push(Row::new("C_Py-lit", name, share, before, both(Coding::means(Code::Bf16, level)?)?));
    }
    rows.push(Row::new("C_Py-lit", "means of 2", "1/2", after, both(Coding::means(Code::Bf16, 1)?)?));
    let values = each(subject, |_, _| Ok(Codec::new(bf16(), Coding::means(Code::Bf16, 1)?)))?;
    rows.push(Row::new("C_Py-lit", "means of 2, V alone", "3/4", after, values));
    let old = (subject.window() / 4) as u32;
    let four = Coding::means(Code::Bf16, 2)?;
    rows.push(Row {
        age: Some((old, Codec::new(four.clone(), four))),
        ..Row::new(
            "C_Py-lit",
            format!("means of 2, of 4 after {old}, K before rotation"),
            "1/2 1/4",
            before,
            both(Coding::means(Code::Bf16, 1)?)?,
        )
    });
    rows.push(Row {
        age: Some((old, Codec::new(Coding::new(Code::Int4), Coding::new(Code::Int4)))),
        ..Row::new("C_Hy", format!("int8, int4 after {old}"), "1", after, code(Code::Int8, Code::Int8)?)
    });
    let sparse = |id, name: &str, code: Option<Code>, drops: &[(usize, Eviction)]| -> Result<Row> {
        let codec = |code| each(subject, |_, _| Ok(Codec::new(Coding::new(code), Coding::new(code))));
        let codecs = code.map_or(Ok(vec![]), codec)?;
        Ok(Row { drops: drops.to_vec(), ..Row::new(id, name, "1/2", after, codecs) })
    };
    let half = (subject.window() / 2) as u32;
    let pyramid = PyramidKv::new(half).window(crate::RING as u32 + crate::SINKS);
    let pyramid = Eviction::new(
        SnapKv::default(),
        Budget::Layers(pyramid.budgets_of(subject.layers as u32, 2 * half)?.into()),
    );
    let chunks = Eviction::new(Chunks::new(SnapKv::default(), CHUNK), Budget::Tokens(half));
    let fast = |policy| Eviction::new(policy, Budget::Share(0.5));
    let from = |first: usize, how: Eviction| -> Vec<(usize, Eviction)> {
        (first..subject.layers).map(|layer| (layer, how.clone())).collect()
    };
    rows.push(sparse("C_Py", "PyramidKV, 1/2 of the tokens", None, &from(0, pyramid.clone()))?);
    rows.push(sparse("C_Py", "PyramidKV by pages, int8", Some(Code::Int8), &from(0, pyramid.by_page()))?);
    rows.push(sparse("C_Ch", "ChunkKV, 1/2 of the tokens", None, &from(0, chunks.clone()))?);
    rows.push(sparse("C_Ch", "ChunkKV by pages, int4", Some(Code::Int4), &from(0, chunks.by_page()))?);
    rows.push(sparse("C_F", "FastV, 1/2 from layer 2", None, &fast_v(subject.layers, 2, fast)?)?);
    rows.push(sparse(
        "C_F",
        "FastV by pages, int8",
        Some(Code::Int8),
        &fast_v(subject.layers, 2, |p| fast(p).by_page())?,
    )?);
    if let Some(importance) = importance {
        let equal = vec![1.0; importance.len()];
        for (name, importance) in [("heads alike", &*equal), ("by measured importance", importance)] {
            let mixed = by_head(subject, &three, &of_three, importance, bytes(0))?;
            let name = format!("int2, int4 or int8 by head, {name}");
            let row = Row::new("C_Hy", name, "1", after, mixed);
            rows.push(Row { k: "mixed".into(), v: "mixed".into(), ..row });
        }
    }
    debug_assert!(rotated.keys() == after && plain.keys() == before);
    Ok(rows)
}
