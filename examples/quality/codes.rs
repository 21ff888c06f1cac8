//! Codes of 2 to 8 bits compared, with all bytes of the cache: ring, sinks and open pages too.

use crate::rows::Row;
use pikv::Dtype;
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::policy::{Budget, Chunks, Eviction, SnapKv};
use pikv_engine::common::cache::Keys;
use pikv_engine::llama::rounding::Rounding;
use pikv_engine::measure::subject::Subject;
use std::error::Error;
use std::num::NonZeroU32;

/// Positions of a chunk, as the paper of ChunkKV has it.
pub const CHUNK: NonZeroU32 = NonZeroU32::new(10).unwrap();

/// Rings, in tokens. Every row is measured with each.
const RINGS: [usize; 2] = [128, 32];

/// The rows: codes for K by channel and V by token, those after a Hadamard transform, and those with half of the tokens evicted by
/// pages; each with rings of two lengths, and with tokens filed by their expert and all together. bf16 comes first, forms of llama.cpp
/// last.
pub fn rows(subject: &Subject) -> Result<Vec<Row>, Box<dyn Error>> {
    let dim = subject.head_dim as u32;
    let heads = |codec: Codec| vec![vec![codec; subject.kv_heads]; subject.layers];
    let plain = |k, v| heads(Codec::new(Coding::new(k), Coding::new(v)));
    let turned = |code| -> Result<_, Box<dyn Error>> {
        let coding = Coding::new(code).map(Map::hadamard(dim)?);
        Ok(heads(Codec::new(coding.clone(), coding)))
    };
    let row = |name: String, codecs| Row::new("C_Q", name, "1", Keys::Rotated, codecs);
    let mut all = vec![row("bf16".into(), vec![])];
    let codes =
        [Code::Int8, Code::Int6, Code::Int5, Code::Int4, Code::Int3, Code::Int2, Code::Mxfp4, Code::Nvfp4];
    for code in codes {
        all.push(row(code.name().into(), plain(code, code)));
    }
    for (k, v) in [
        (Code::Int8, Code::Int5),
        (Code::Int4, Code::Int3),
        (Code::Int3, Code::Int2),
        (Code::Int2, Code::Int3),
        (Code::Int2, Code::Int4),
    ] {
        all.push(row(format!("{} K, {} V", k.name(), v.name()), plain(k, v)));
    }
    for code in [Code::Int3, Code::Int2] {
        all.push(row(format!("{}, Hadamard K and V", code.name()), turned(code)?));
    }
    for code in [Code::Int8, Code::Int5, Code::Int4, Code::Int3] {
        let half = Budget::Tokens(subject.window() as u32 / 2);
        let how = Eviction::new(Chunks::new(SnapKv::default(), CHUNK), half).by_page();
        let drops = (0..subject.layers).map(|layer| (layer, how.clone())).collect();
        let name = format!("{}, half of the tokens by ChunkKV", code.name());
        all.push(Row { budget: "1/2".into(), drops, ..row(name, plain(code, code)) });
    }
    let filed = if subject.experts.0 > 1 { vec![true, false] } else { vec![false] };
    let mut rows = Vec::new();
    for ring in RINGS {
        for by_expert in &filed {
            rows.extend(all.iter().map(|row| Row { ring, by_expert: *by_expert, ..row.clone() }));
        }
    }
    rows.extend(FORMS.map(of_llama_cpp));
    Ok(rows)
}

/// Forms of K and V that users of llama.cpp choose.
const FORMS: [[Rounding; 2]; 4] = [
    [Rounding::Q8_0, Rounding::Q8_0],
    [Rounding::Q8_0, Rounding::Q5_0],
    [Rounding::Q5_0, Rounding::Q5_0],
    [Rounding::Q4_0, Rounding::Q4_0],
];

/// All tokens in these forms of K and V, read in f32.
fn of_llama_cpp([k, v]: [Rounding; 2]) -> Row {
    let (k_name, v_name) = (k.name().to_owned(), v.name().to_owned());
    let name = if k == v {
        format!("{k_name} of llama.cpp")
    } else {
        format!("{k_name} K, {v_name} V of llama.cpp")
    };
    Row {
        k: k_name,
        v: v_name,
        dtype: Dtype::F32,
        rounded: Some([k, v]),
        by_expert: false,
        ..Row::new("C_Q", name, "1", Keys::Rotated, vec![])
    }
}

/// bf16 bytes of the keys and values of `tokens`, without anything else.
pub fn plain_bytes(subject: &Subject, tokens: usize) -> u64 {
    (subject.layers * subject.kv_heads * tokens * 2 * subject.head_dim * 2) as u64
}
