//! A request's tokens do not depend on who else is served, on what was found, or on where its pages were.

use crate::{MOE, NOVEL, answer, body, nothing_is_left, serve, text};
use pikv::codec::Code;
use pikv_serve::client::complete;
use pikv_serve::{Options, Server, Store};
use serde_json::{Value, json};
use std::sync::Arc;

/// Greedy and seeded requests of many lengths; every other prompt begins as its neighbour's does.
fn requests() -> Vec<Value> {
    let n = if pikv_test::full() { 64 } else { 16 };
    let request = |i: usize| {
        let system = &NOVEL[..if i.is_multiple_of(2) { 100 } else { 0 }];
        let prompt = format!("{system}{}", &NOVEL[1000 * i..][..20 + 37 * i % 300]);
        let choice = if i.is_multiple_of(3) {
            json!({})
        } else {
            json!({"temperature": 0.9, "top_p": 0.95, "seed": i})
        };
        body(&prompt, 4 + i % 20, choice)
    };
    (0..n).map(request).collect()
}

fn all_at_once(server: &Server, requests: &[Value]) -> Vec<String> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = requests.iter().map(|body| scope.spawn(|| text(server, body))).collect();
        asked.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_request_has_the_same_tokens_alone_and_among_others() {
    let requests = requests();
    let options = Options { prefixes: 0, parking: 0, ..Options::default() };
    let alone = serve(options.clone());
    let expected: Vec<String> = requests.iter().map(|body| text(&alone, body)).collect();
    assert!(expected.iter().all(|text| !text.is_empty()));
    nothing_is_left(&alone);

    // Among others, with room for all.
    let server = serve(options.clone());
    assert_eq!(all_at_once(&server, &requests), expected, "among others");
    let counts = &server.clear_prefixes().unwrap().counts;
    assert!(counts.rows > 2 * counts.steps, "nothing was batched: {counts:?}");
    nothing_is_left(&server);

    // Twice with an index: the second time all is found but what is left to compute.
    let server = serve(Options { prefixes: 64 << 20, ..options.clone() });
    for round in ["the first time", "the second time"] {
        assert_eq!(all_at_once(&server, &requests), expected, "{round} with an index");
    }
    let prefixes = server.look().unwrap().prefixes.unwrap();
    assert!(prefixes.hit_tokens > prefixes.asked_tokens / 4, "{prefixes:?}");
    nothing_is_left(&server);
}

#[test]
fn a_request_that_was_put_back_has_the_same_tokens() {
    // Short prompts, so that many begin, and answers with which they outgrow the budget.
    let n = if pikv_test::full() { 32 } else { 5 };
    let request = |i: usize| {
        let system = &NOVEL[..if i.is_multiple_of(2) { 64 } else { 0 }];
        let prompt = format!("{system}{}", &NOVEL[1000 * i..][..10 + i]);
        body(&prompt, 70 - 5 * i % 20, json!({"temperature": 0.8, "seed": i}))
    };
    let requests: Vec<Value> = (0..n).map(request).collect();
    let options = Options { prefixes: 0, parking: 0, ..Options::default() };
    let roomy = serve(options.clone());
    let expected = all_at_once(&roomy, &requests);
    nothing_is_left(&roomy);
    // The others wait in host memory, or are computed again where there is none, or too little.
    for (parking, prefixes) in [(64 << 20, 256 << 10), (0, 256 << 10), (500 << 10, 0)] {
        let server = serve(Options { budget: 800 << 10, parking, prefixes, ..options.clone() });
        assert_eq!(all_at_once(&server, &requests), expected, "parking {parking}, prefixes {prefixes}");
        let counts = &server.clear_prefixes().unwrap().counts;
        let put_back = if parking > 0 { counts.parked } else { counts.recomputed };
        assert!(put_back > 0, "parking {parking}, prefixes {prefixes}: {counts:?}");
        assert!(parking > 0 || counts.parked == 0, "{counts:?}");
        nothing_is_left(&server);
    }
}

#[test]
fn packed_pages_are_found_at_checkpoints() {
    let store = Store::Packed(Code::Int8);
    let server = serve(Options { store, ring: 64, ..Options::default() });
    let asks = body(&NOVEL[..400], 8, json!({"temperature": 0.7, "seed": 5}));
    let answers = [answer(&server, &asks), answer(&server, &asks)];
    assert_eq!(answers[0]["choices"], answers[1]["choices"]);
    let cached = answers.map(|answer| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64());
    assert_eq!(cached, [Some(0), Some(256)]);
    nothing_is_left(&server);
}

#[test]
fn a_key_does_not_find_what_another_one_left() {
    let server = serve(Options::default());
    let asks = body(&NOVEL[..200], 1, json!({})).to_string();
    let cached = |key: &str| {
        let headers = format!("authorization: Bearer {key}\r\n");
        let reply =
            pikv_serve::client::send(server.address, "POST", "/v1/completions", asks.as_bytes(), &headers);
        reply.unwrap().json().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!([cached("a"), cached("b"), cached("a"), cached("b")], [0, 0, 192, 192]);
}

/// The events of a stream.
fn events(server: &Server, body: &Value) -> Vec<String> {
    let mut reply = complete(server.address, body).unwrap();
    assert_eq!(reply.status, 200);
    assert!(reply.headers.contains("text/event-stream"), "{}", reply.headers);
    let mut all = Vec::new();
    while let Some(events) = reply.body.events().unwrap() {
        all.extend(events);
    }
    all
}

#[test]
fn a_stream_has_the_text_of_the_whole_answer() {
    let server = serve(Options::default());
    for (max_tokens, more) in [
        (40, json!({})),
        (40, json!({"temperature": 1.5, "seed": 3})),
        (200, json!({"stop": [" the", "zzz"]})),
        // Bytes of any kind: characters that never become whole, too.
        (60, json!({"prompt": [240, 159, 152], "temperature": 2, "seed": 1})),
    ] {
        let mut asks = body(&NOVEL[5000..5100], max_tokens, more);
        let whole = answer(&server, &asks);
        asks["stream"] = json!(true);
        asks["stream_options"] = json!({"include_usage": true});
        let mut events = events(&server, &asks);
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let (usage, events) = events.split_last().unwrap();
        assert_eq!(usage["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
        let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, whole["choices"][0]["text"], "{asks}");
        let reasons: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
        let (reason, none) = reasons.split_last().unwrap();
        assert_eq!(**reason, whole["choices"][0]["finish_reason"]);
        assert!(none.iter().all(|reason| reason.is_null()));
        if let Some(stop) = asks["stop"].get(0).and_then(Value::as_str) {
            assert_eq!(**reason, "stop");
            assert!(!text.contains(stop), "{text:?}");
        }
    }
    nothing_is_left(&server);
}

#[test]
fn the_model_is_served_by_its_name() {
    let server = Server::start(Arc::clone(&MOE), Options::default(), ([127, 0, 0, 1], 0).into()).unwrap();
    let models =
        pikv_serve::client::send(server.address, "GET", "/v1/models", b"", "").unwrap().json().unwrap();
    assert_eq!(models["data"][0]["id"], "austen-moe");
}
