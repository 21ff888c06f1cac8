//! A Llama of a few weights, whose file names a chat template.

use crate::nothing_is_left;
use pikv_engine::common::sample::SplitMix;
use pikv_engine::llama::gguf::Gguf;
use pikv_serve::client::send;
use pikv_serve::model::Model;
use pikv_serve::{Options, Server};
use pikv_test::gguf_writer::Writer;
use serde_json::{Value, json};
use std::sync::Arc;

const HIDDEN: usize = 32;

/// Tokens are what prints, the space and the line end, and three that structure a chat.
fn file(template: &str) -> Writer {
    let mut tokens: Vec<String> = (0x21..=0x7e).map(|byte: u8| char::from(byte).to_string()).collect();
    tokens.extend(["Ġ", "Ċ", "<|im_start|>", "<|im_end|>", "th"].map(String::from));
    let vocab = tokens.len();
    let mut file = Writer::new();
    file.text("general.architecture", "llama").text("tokenizer.ggml.model", "gpt2");
    file.text("tokenizer.ggml.pre", "smollm").text("tokenizer.chat_template", template);
    file.texts("tokenizer.ggml.tokens", &tokens.iter().map(String::as_str).collect::<Vec<_>>());
    file.texts("tokenizer.ggml.merges", &["t h"]);
    file.whole("tokenizer.ggml.eos_token_id", vocab as u32 - 2);
    for (name, value) in [
        ("embedding_length", HIDDEN),
        ("feed_forward_length", 48),
        ("block_count", 2),
        ("context_length", 512),
    ] {
        file.whole(&format!("llama.{name}"), value as u32);
    }
    file.whole("llama.attention.head_count", 4).whole("llama.attention.head_count_kv", 2);
    file.real("llama.attention.layer_norm_rms_epsilon", 1e-5);
    let mut random = SplitMix(9);
    let mut weights = |file: &mut Writer, name: String, dims: &[usize]| {
        let n = dims.iter().product();
        let values: Vec<f32> = (0..n).map(|_| random.unit() as f32 - 0.5).collect();
        file.f32s(&name, &dims.iter().map(|dim| *dim as u64).collect::<Vec<_>>(), &values);
    };
    weights(&mut file, "token_embd.weight".into(), &[HIDDEN, vocab]);
    weights(&mut file, "output_norm.weight".into(), &[HIDDEN]);
    for layer in 0..2 {
        for (name, dims) in [
            ("attn_norm", &[HIDDEN][..]),
            ("attn_q", &[HIDDEN, HIDDEN]),
            ("attn_k", &[HIDDEN, HIDDEN / 2]),
            ("attn_v", &[HIDDEN, HIDDEN / 2]),
            ("attn_output", &[HIDDEN, HIDDEN]),
            ("ffn_norm", &[HIDDEN]),
            ("ffn_gate", &[HIDDEN, 48]),
            ("ffn_up", &[HIDDEN, 48]),
            ("ffn_down", &[48, HIDDEN]),
        ] {
            weights(&mut file, format!("blk.{layer}.{name}.weight"), dims);
        }
    }
    file
}

fn model(template: &str) -> Model {
    Model::llama("tiny", &Gguf::new(Box::new(file(template).bytes())).unwrap()).unwrap()
}

fn ask(server: &Server, path: &str, body: &Value) -> Value {
    send(server.address, "POST", path, body.to_string().as_bytes(), "").unwrap().json().unwrap()
}

#[test]
fn chat_is_the_completion_of_the_templates_tokens() {
    let model = Arc::new(model("{{ '<|im_start|>' + role }} .. <|im_end|>"));
    let (start, end) = model.chat.unwrap();
    let messages =
        [("system", "Be brief."), ("user", "the <|im_end|> is text")].map(|(a, b)| (a.into(), b.into()));
    let tokens = model.encode_chat(&messages).unwrap().unwrap();
    let count = |wanted| tokens.iter().filter(|token| **token == wanted).count();
    // What a message says is never a token that ends it.
    assert_eq!((count(start), count(end)), (3, 2));
    let text: Vec<u8> = tokens.iter().flat_map(|token| model.bytes(*token)).collect();
    assert_eq!(text, b"system\nBe brief.\nuser\nthe <|im_end|> is text\nassistant\n");

    let server = Server::start(model, Options::default(), ([127, 0, 0, 1], 0).into()).unwrap();
    let messages: Vec<Value> = messages
        .iter()
        .map(|(role, content): &(String, String)| json!({"role": role, "content": content}))
        .collect();
    for seed in 0..3 {
        let more = json!({"model": "tiny", "max_tokens": 30, "seed": seed});
        let (mut chat, mut plain) = (more.clone(), more);
        chat["messages"] = json!(messages);
        plain["prompt"] = json!(tokens);
        let chat = ask(&server, "/v1/chat/completions", &chat);
        let plain = ask(&server, "/v1/completions", &plain);
        assert_eq!(chat["object"], "chat.completion");
        assert_eq!(chat["choices"][0]["message"]["content"], plain["choices"][0]["text"]);
        assert_eq!(chat["choices"][0]["finish_reason"], plain["choices"][0]["finish_reason"]);
    }
    // A byte without a token is named.
    let error = ask(&server, "/v1/completions", &json!({"model": "tiny", "prompt": "a\tb"}));
    assert_eq!(error["error"]["code"], "invalid_text");
    nothing_is_left(&server);
}

#[test]
fn a_template_that_is_not_known_is_none() {
    assert!(model("[INST] {{ content }} [/INST]").chat.is_none());
}
