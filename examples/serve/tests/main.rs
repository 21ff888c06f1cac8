//! The server over real connections, with the mixture of experts of this repository and a Llama of a few weights.

mod gone;
mod kept;
mod llama;
mod page;
mod same;
mod text;
mod wrong;

use pikv_serve::client::complete;
use pikv_serve::model::Model;
use pikv_serve::{Options, Server, load};
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};

static MOE: LazyLock<Arc<Model>> =
    LazyLock::new(|| Arc::new(Model::moe().expect("the model is in the repository")));
static NOVEL: LazyLock<String> = LazyLock::new(|| {
    let text = std::fs::read_to_string(pikv_engine::example("text/northangerabbey.txt")).unwrap();
    text.chars().filter(char::is_ascii).collect()
});

fn serve(options: Options) -> Server {
    Server::start(MOE.clone(), options, ([127, 0, 0, 1], 0).into()).unwrap()
}

/// A request's body; `more` replaces and adds fields.
fn body(prompt: &str, max_tokens: usize, more: Value) -> Value {
    let mut body =
        json!({"model": "austen-moe", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The text of an answer that has to be whole.
fn text(server: &Server, body: &Value) -> String {
    let answer = answer(server, body);
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_string()
}

fn answer(server: &Server, body: &Value) -> Value {
    complete(server.address, body).unwrap().json().unwrap()
}

/// That no request and no byte is left.
fn nothing_is_left(server: &Server) {
    let look = load::at_rest(server).unwrap();
    assert!(look.rows.is_empty(), "{:?}", look.rows);
    assert_eq!(look.usage.taken, 0);
    assert!(look.usage.tiers.iter().all(|tier| tier.bytes == 0), "{:?}", look.usage.tiers);
}
