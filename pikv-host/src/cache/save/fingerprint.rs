//! Hashes of a configuration, by which a saved sequence recognises caches that can restore it.

use crate::base::frequencies::Frequencies;
use crate::codec::{Codec, Coding, HeadCodec};
use crate::config::shape::CacheShape;
use crate::policy::rule::Rule;
use crate::policy::{Budget, Eviction};
use pikv_core::plan::LayerShape;
use pikv_core::rope::{Pairs, Rope};

/// A part of a configuration: its key in the header, and its name in errors.
pub struct ShapePart {
    pub key: &'static str,
    pub is: &'static str,
    of: fn(&CacheShape, &mut Sum),
}

/// All parts that results depend on. Budget, shards, tiers, back end and lanes are not among them: results do not depend on them.
pub const PARTS: [ShapePart; 8] = [
    ShapePart { key: "layers", is: "the layers (heads, widths, dtypes, windows, rotations)", of: layers },
    ShapePart { key: "ring", is: "the ring and the rollback", of: ring },
    ShapePart { key: "sinks", is: "the sinks", of: sinks },
    ShapePart { key: "experts", is: "the experts and how many a token goes to", of: experts },
    ShapePart { key: "codecs", is: "the codecs of the heads, with their maps", of: codecs },
    ShapePart { key: "policies", is: "the eviction policies and their budgets", of: policies },
    ShapePart { key: "bounds", is: "the bounds (whether extremes of keys are kept)", of: bounds },
    ShapePart { key: "hits", is: "the hits (what counts as one)", of: hits },
];

/// Hash of one part, as 64 hexadecimal digits.
pub fn sum_of(part: &ShapePart, shape: &CacheShape) -> String {
    let mut sum = Sum(blake3::Hasher::new());
    sum.bytes(part.key.as_bytes());
    (part.of)(shape, &mut sum);
    sum.0.finalize().to_hex().to_string()
}

/// A hash of fields, each preceded by its length.
struct Sum(blake3::Hasher);

impl Sum {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }

    fn number(&mut self, n: impl Into<u64>) {
        self.bytes(&n.into().to_le_bytes());
    }

    fn numbers<T: Into<u64>>(&mut self, all: impl IntoIterator<Item = T>) {
        all.into_iter().for_each(|n| self.number(n));
    }

    fn float(&mut self, x: f64) {
        self.number(x.to_bits());
    }

    fn floats(&mut self, x: &[f32]) {
        self.number(x.len() as u64);
        x.iter().for_each(|x| self.number(x.to_bits()));
    }

    /// Adds whether the value is present, and the value.
    fn option<T>(&mut self, of: Option<T>, add: impl FnOnce(&mut Sum, T)) {
        self.number(u32::from(of.is_some()));
        if let Some(of) = of {
            add(self, of);
        }
    }

    fn rope(&mut self, rope: Rope) {
        self.float(rope.theta);
        self.number(rope.rotary_dim);
        self.number(u32::from(rope.pairs == Pairs::Neighbours));
    }

    fn frequencies(&mut self, frequencies: &Frequencies) {
        self.number(frequencies.inverse().len() as u64);
        frequencies.inverse().iter().for_each(|x| self.float(*x));
        self.float(frequencies.factor());
    }

    fn coding(&mut self, coding: &Coding) {
        self.bytes(coding.code().name().as_bytes());
        self.option(coding.level(), Sum::number);
        self.option(coding.rank(), Sum::number);
        self.option(coding.mapped(), |sum, map| {
            sum.numbers([map.wide(), map.narrow()]);
            sum.floats(&map.encode());
            sum.floats(&map.decode());
            sum.option(map.bias(), Sum::floats);
        });
    }

    fn codec(&mut self, Codec { k, v }: &Codec) {
        self.coding(k);
        self.coding(v);
    }

    fn head_codec(&mut self, codec: &HeadCodec) {
        self.codec(&codec.codec);
        self.option(codec.aged.as_ref(), |sum, aged| {
            sum.number(aged.after);
            sum.codec(&aged.codec.codec);
        });
    }

    fn budget(&mut self, budget: &Budget) {
        match budget {
            Budget::Tokens(tokens) => self.numbers([0, *tokens]),
            Budget::Layers(layers) => {
                self.number(1u32);
                self.numbers(layers.iter().copied());
            }
            Budget::Heads(heads) => {
                self.numbers([2, heads.len() as u32]);
                for heads in heads.iter() {
                    self.number(heads.len() as u64);
                    self.numbers(heads.iter().copied());
                }
            }
            Budget::Share(share) => self.numbers([3, share.to_bits()]),
            Budget::Bytes(bytes) => self.numbers([4, *bytes]),
        }
    }

    fn rule(&mut self, rule: &Rule) {
        let Eviction { policy, budget, batch, by_page, adaptive } = &rule.eviction;
        self.bytes(rule.name.as_bytes());
        policy.parameters(&mut |bytes| self.bytes(bytes));
        self.numbers([rule.words, rule.head_words, rule.versions].map(|n| n as u64));
        self.option(policy.rotation(), Sum::rope);
        self.budget(budget);
        self.option(*batch, Sum::number);
        self.number(u32::from(*by_page));
        self.option(*adaptive, |sum, floor| sum.number(floor.to_bits()));
    }
}

fn layers(shape: &CacheShape, sum: &mut Sum) {
    sum.number(shape.config.layers.len() as u64);
    for (LayerShape { kv_heads, query_heads, layout, window, rope, .. }, frequencies) in
        shape.config.layers.iter().zip(&shape.frequencies)
    {
        sum.numbers([*kv_heads, *query_heads, layout.k_dim, layout.v_dim]);
        [layout.k, layout.v].iter().for_each(|dtype| sum.bytes(dtype.name().as_bytes()));
        sum.option(*window, Sum::number);
        sum.option(*rope, Sum::rope);
        sum.option(frequencies.as_ref(), Sum::frequencies);
    }
}

fn ring(shape: &CacheShape, sum: &mut Sum) {
    sum.numbers([shape.config.ring, shape.config.rollback]);
}

fn sinks(shape: &CacheShape, sum: &mut Sum) {
    shape.stores.iter().for_each(|store| sum.number(store.sinks));
}

fn experts(shape: &CacheShape, sum: &mut Sum) {
    sum.numbers([shape.config.experts, shape.config.top_k]);
}

fn codecs(shape: &CacheShape, sum: &mut Sum) {
    shape
        .codecs
        .iter()
        .flat_map(|heads| heads.iter())
        .for_each(|codec| sum.option(codec.as_ref(), Sum::head_codec));
}

fn policies(shape: &CacheShape, sum: &mut Sum) {
    shape.rules.iter().for_each(|rule| sum.option(rule.as_deref(), Sum::rule));
}

fn bounds(shape: &CacheShape, sum: &mut Sum) {
    sum.number(u32::from(shape.config.key_bounds));
}

fn hits(shape: &CacheShape, sum: &mut Sum) {
    let hits = shape.config.hits.unwrap_or_default();
    sum.numbers([hits.pages, hits.every, hits.known]);
}
