//! A cache under test, its tokens, and its outputs.

use crate::mix;
use half::{bf16, f16};
use pikv::codec::{Code, Codec, Coding};
use pikv::lanes::Lanes;
use pikv::report::{PageInfo, PageMass};
use pikv::shard::ShardMap;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Layout, Sequence, Step};
use pikv_test::backend::backend;

#[derive(Clone, Debug)]
pub struct Setup {
    pub layer: LayerShape,
    pub layers: usize,
    pub ring: u32,
    pub rollback: u32,
    pub sinks: u32,
    pub experts: u32,
    /// Codecs of the KV heads, in turn.
    pub codecs: Vec<Option<Codec>>,
    /// The second codec of every head that has a first, and after how many tokens.
    pub age: Option<(u32, Codec)>,
    pub shards: ShardMap,
    pub lanes: Lanes,
    pub budget: u64,
}

pub fn codec(k: Code, v: Code) -> Codec {
    Codec::new(Coding::new(k), Coding::new(v))
}

pub fn shape(kv_heads: u32, group: u32, k_dim: u32, v_dim: u32, dtype: Dtype) -> LayerShape {
    LayerShape::new(kv_heads, kv_heads * group, k_dim, dtype).values(v_dim, dtype)
}

impl Setup {
    pub fn new(layer: LayerShape, ring: u32, codec: Codec) -> Setup {
        Setup {
            layer,
            layers: 1,
            ring,
            rollback: 0,
            sinks: 0,
            experts: 1,
            codecs: vec![Some(codec)],
            age: None,
            shards: ShardMap::ONE,
            lanes: Lanes::detect(),
            budget: 1 << 28,
        }
    }

    pub fn codec(&self, head: usize) -> Option<&Codec> {
        self.codecs[head % self.codecs.len()].as_ref()
    }

    pub fn config(&self) -> CacheConfig {
        let mut config = CacheConfig::new(vec![self.layer; self.layers], self.budget)
            .ring(self.ring)
            .rollback(self.rollback)
            .sinks(self.sinks)
            .experts(self.experts, 1)
            .shards(self.shards)
            .lanes(self.lanes)
            .nan_fill(true)
            .backend(backend());
        for head in 0..self.layer.kv_heads as usize {
            for layer in 0..self.layers {
                if let Some(codec) = self.codec(head) {
                    config = config.compress_head(layer, head, codec.clone());
                    if let Some((after, codec)) = &self.age {
                        config = config.age_head(layer, head, *after, codec.clone());
                    }
                }
            }
        }
        config
    }

    pub fn cache(&self) -> Cache {
        Cache::new(self.config()).unwrap()
    }

    /// The expert that token `id` is filed by. Some are rare.
    pub fn home(&self, layer: usize, id: u64) -> u16 {
        let h = mix(&[id, layer as u64, 77]);
        let all = h >> 8 & 0xffff;
        (all % u64::from(if h & 3 == 0 { self.experts } else { self.experts.div_ceil(2) })) as u16
    }

    /// The position from which on a page that `by` packed is read as the second codec left it.
    pub fn ages_at(&self, by: u32) -> Option<u32> {
        self.age.as_ref().map(|(after, _)| by + after)
    }

    /// Bytes of a page that was packed again.
    pub fn aged_bytes(&self) -> u64 {
        let Layout { k_dim, v_dim, .. } = self.layer.layout;
        self.age.as_ref().map_or(0, |(_, codec)| codec.packed(k_dim, v_dim).bytes())
    }

    /// Bytes of a packed page of a head.
    pub fn packed_bytes(&self, head: usize) -> u64 {
        let Layout { k_dim, v_dim, .. } = self.layer.layout;
        self.codec(head).map_or(0, |codec| codec.packed(k_dim, v_dim).bytes())
    }
}

fn noise(parts: &[u64], n: usize) -> impl Iterator<Item = f32> + use<> {
    let h = mix(parts);
    (0..n as u64).map(move |i| (mix(&[h, i]) >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
}

fn stored(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// The key of a token, as its head stores it: channels have offsets of their own, some of them large.
pub fn key(setup: &Setup, layer: usize, id: u64, head: usize) -> Vec<f32> {
    let Layout { k_dim, k, .. } = setup.layer.layout;
    let x = noise(&[id, layer as u64, head as u64, 0], k_dim as usize);
    let offset = |c: usize| if c % 7 == 3 { 2.5 } else { (c % 5) as f32 * 0.25 - 0.5 };
    x.enumerate().map(|(c, x)| stored(k, x + offset(c))).collect()
}

pub fn value(setup: &Setup, layer: usize, id: u64, head: usize) -> Vec<f32> {
    let Layout { v_dim, v, .. } = setup.layer.layout;
    noise(&[id, layer as u64, head as u64, 1], v_dim as usize).map(|x| stored(v, x)).collect()
}

/// The queries of a token, all heads.
pub fn query(setup: &Setup, layer: usize, id: u64) -> Vec<f32> {
    noise(&[id, layer as u64, 2], (setup.layer.query_heads * setup.layer.layout.k_dim) as usize).collect()
}

/// The results of a layer for the rows of a step.
#[derive(Clone, Debug, Default)]
pub struct Got {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub mass: Vec<PageMass>,
}

impl Got {
    pub fn bits(&self) -> (Vec<u32>, Vec<u32>) {
        (bits(&self.out), bits(&self.lse))
    }
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub fn options(setup: &Setup) -> Attend {
    Attend::new((setup.layer.layout.k_dim as f32).powf(-0.5))
}

/// Appends layer `layer` of tokens `ids` and attends; then attends again with mass, and compares the bits of the outputs.
pub fn fill(
    setup: &Setup,
    step: &mut Step<'_>,
    layer: usize,
    ids: &[u64],
    options: &Attend,
    mass: bool,
) -> Result<Got, Error> {
    let heads = setup.layer.kv_heads as usize;
    let all = |row: fn(&Setup, usize, u64, usize) -> Vec<f32>| -> Vec<f32> {
        ids.iter().flat_map(|id| (0..heads).flat_map(|h| row(setup, layer, *id, h))).collect()
    };
    step.append(layer, &all(key), &all(value))?;
    let q: Vec<f32> = ids.iter().flat_map(|id| query(setup, layer, *id)).collect();
    let n = ids.len() * setup.layer.query_heads as usize;
    let v_dim = setup.layer.layout.v_dim as usize;
    let mut got = Got { out: vec![f32::NAN; n * v_dim], lse: vec![f32::NAN; n], mass: vec![] };
    step.attend(layer, &q, options, AttendOutput::new(&mut got.out).lse(&mut got.lse))?;
    if mass {
        let (mut out, mut lse) = (vec![f32::NAN; n * v_dim], vec![f32::NAN; n]);
        let output = AttendOutput::new(&mut out).lse(&mut lse).mass(&mut got.mass);
        step.attend(layer, &q, options, output)?;
        assert_eq!((bits(&out), bits(&lse)), got.bits(), "the mass changes the output");
    }
    if setup.experts > 1 {
        let homes: Vec<u16> = ids.iter().map(|id| setup.home(layer, *id)).collect();
        step.route(layer, &homes)?;
    }
    assert!(got.out.iter().chain(&got.lse).all(|x| x.is_finite()));
    Ok(got)
}

/// One step of some sequences.
pub fn feed_all(
    setup: &Setup,
    cache: &Cache,
    parts: &mut [(&mut Sequence, Vec<u64>)],
    options: &Attend,
    mass: bool,
) -> Vec<Got> {
    let ids: Vec<u64> = parts.iter().flat_map(|(_, ids)| ids.clone()).collect();
    let mut step = cache.begin(parts.iter_mut().map(|(s, ids)| (&mut **s, ids.len() as u32))).unwrap();
    let got = (0..setup.layers).map(|l| fill(setup, &mut step, l, &ids, options, mass).unwrap()).collect();
    step.commit().unwrap();
    got
}

pub fn feed(
    setup: &Setup,
    cache: &Cache,
    sequence: &mut Sequence,
    ids: impl IntoIterator<Item = u64>,
) -> Vec<Got> {
    feed_all(setup, cache, &mut [(sequence, ids.into_iter().collect())], &options(setup), false)
}

/// A page and the bits of its tokens.
pub type Stored = (PageInfo, Vec<(u32, Vec<u32>, Vec<u32>)>);

/// All pages of all layers and heads, with their readable tokens.
pub fn snapshot(setup: &Setup, sequence: &Sequence) -> Vec<Stored> {
    let Layout { k_dim, v_dim, .. } = setup.layer.layout;
    let (mut k, mut v) = (vec![0.0; k_dim as usize], vec![0.0; v_dim as usize]);
    let mut all = vec![];
    for layer in 0..setup.layers {
        for head in 0..setup.layer.kv_heads as usize {
            for page in sequence.pages(layer, head).unwrap() {
                let mut read = |lane| {
                    let p = sequence.read(layer, head, page.id, lane, &mut k, &mut v).unwrap();
                    assert!(k.iter().chain(&v).all(|x| x.is_finite()));
                    (p.0, bits(&k), bits(&v))
                };
                let tokens: Vec<_> = (0..page.tokens).map(&mut read).collect();
                let positions = sequence.positions(layer, head, page.id).unwrap().map(|(_, p)| p.0);
                assert!(positions.eq(tokens.iter().map(|t| t.0)));
                all.push((page, tokens));
            }
        }
    }
    all
}
