//! Requests that cannot be answered are told why, and leave nothing.

use crate::{MOE, NOVEL, body, nothing_is_left, serve, text};
use pikv_serve::client::{complete, send};
use pikv_serve::{Options, Server};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

fn refused(server: &Server, path: &str, sent: &[u8]) -> (u16, String, Value) {
    let reply = send(server.address, "POST", path, sent, "").unwrap();
    let status = reply.status;
    let error = reply.json().unwrap()["error"].clone();
    assert!(
        error["message"].as_str().is_some_and(|message| !message.is_empty() && message.len() < 400),
        "{error}"
    );
    assert!(error["type"].is_string(), "{error}");
    (status, error["code"].as_str().unwrap().to_string(), error["param"].clone())
}

#[test]
fn bad_bodies_are_refused_by_field() {
    let server = serve(Options::default());
    let asks = |more: Value| body("It is", 4, more).to_string().into_bytes();
    // Numbers that JSON does not have.
    let heat = |number: &str| {
        let body = body("It is", 4, json!({"temperature": "?"})).to_string();
        body.replace("\"?\"", number).into_bytes()
    };
    let long: String = NOVEL[..3000].into();
    let deep = "[".repeat(100_000);
    for (sent, status, code, param) in [
        (b"".to_vec(), 400, "invalid_json", ""),
        (b"{\"model\": \"austen-moe\", ".to_vec(), 400, "invalid_json", ""),
        (b"\xff\xfe{}".to_vec(), 400, "invalid_json", ""),
        (b"[1, 2]".to_vec(), 400, "invalid_json", ""),
        (deep.clone().into_bytes(), 400, "invalid_json", ""),
        (format!("{{\"prompt\": {deep}{}}}", "]".repeat(100_000)).into_bytes(), 400, "invalid_json", ""),
        (asks(json!({})).repeat(2), 400, "invalid_json", ""),
        (heat("NaN"), 400, "invalid_json", ""),
        (heat("-Infinity"), 400, "invalid_json", ""),
        (heat("1e999"), 400, "invalid_json", ""),
        (asks(json!({"model": "gpt-4"})), 404, "model_not_found", "model"),
        (asks(json!({"model": 7})), 400, "invalid_type", "model"),
        (b"{\"prompt\": \"a\"}".to_vec(), 400, "invalid_type", "model"),
        (b"{\"model\": \"austen-moe\"}".to_vec(), 400, "invalid_type", "prompt"),
        (asks(json!({"prompt": ["a", "b"]})), 400, "invalid_type", "prompt"),
        (asks(json!({"prompt": {}})), 400, "invalid_type", "prompt"),
        (asks(json!({"prompt": ""})), 400, "empty_prompt", "prompt"),
        (asks(json!({"prompt": [65, 256]})), 400, "invalid_token", "prompt"),
        (asks(json!({"prompt": [-1]})), 400, "invalid_type", "prompt"),
        (asks(json!({"prompt": long})), 400, "context_length_exceeded", "max_tokens"),
        (asks(json!({"max_tokens": 1_000_000})), 400, "context_length_exceeded", "max_tokens"),
        (asks(json!({"max_tokens": u64::MAX})), 400, "context_length_exceeded", "max_tokens"),
        (asks(json!({"max_tokens": 0})), 400, "invalid_value", "max_tokens"),
        (asks(json!({"max_tokens": -4})), 400, "invalid_type", "max_tokens"),
        (asks(json!({"max_tokens": 1.5})), 400, "invalid_type", "max_tokens"),
        (asks(json!({"temperature": -1})), 400, "invalid_type", "temperature"),
        (asks(json!({"temperature": "hot"})), 400, "invalid_type", "temperature"),
        (asks(json!({"temperature": 1e300})), 400, "invalid_type", "temperature"),
        (asks(json!({"top_p": 1.5})), 400, "invalid_type", "top_p"),
        (asks(json!({"seed": "x"})), 400, "invalid_type", "seed"),
        (asks(json!({"stop": 5})), 400, "invalid_type", "stop"),
        (asks(json!({"stop": [""]})), 400, "invalid_type", "stop"),
        (asks(json!({"stop": ["a", "b", "c", "d", "e"]})), 400, "invalid_type", "stop"),
        (asks(json!({"stream": 1})), 400, "invalid_type", "stream"),
        (asks(json!({"stream_options": 1})), 400, "invalid_type", "stream_options"),
        (asks(json!({"timeout": 0})), 400, "invalid_type", "timeout"),
        (asks(json!({"timeout": 1e9})), 400, "invalid_type", "timeout"),
        (asks(json!({"n": 2})), 400, "unsupported_parameter", "n"),
        (asks(json!({"logprobs": 5})), 400, "unsupported_parameter", "logprobs"),
        (asks(json!({"tools": []})), 400, "unsupported_parameter", "tools"),
    ] {
        let shown = String::from_utf8_lossy(&sent[..sent.len().min(80)]).into_owned();
        let got = refused(&server, "/v1/completions", &sent);
        assert_eq!((got.0, got.1.as_str(), got.2.as_str()), (status, code, Some(param)), "{shown}");
    }
    // What means nothing may be said.
    text(
        &server,
        &body("It is", 1, json!({"n": 1, "logprobs": null, "presence_penalty": 0.0, "user": "me"})),
    );
    nothing_is_left(&server);
}

#[test]
fn a_million_tokens_are_refused_before_they_are_read() {
    let server = serve(Options::default());
    let tokens = format!("{{\"model\": \"austen-moe\", \"prompt\": [65{}]}}", ",65".repeat(1_000_000));
    assert_eq!(refused(&server, "/v1/completions", tokens.as_bytes()).0, 413);
    nothing_is_left(&server);
}

/// Status of the answer to bytes that are no request, or a head too large; 0 if the connection is closed without one.
fn status(server: &Server, sent: &[u8]) -> u16 {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The server may close before all is sent.
    let _ = stream.write_all(sent);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    answer.split(' ').nth(1).map_or(0, |status| status.parse().unwrap())
}

#[test]
fn heads_that_are_wrong_are_refused() {
    let server = serve(Options { deadline: Duration::from_millis(400), ..Options::default() });
    let head = |more: &str| format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\n{more}\r\n").into_bytes();
    for (sent, wanted) in [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec(), [400, 400]),
        (b"POST /v1/completions HTTP/9.9\r\n\r\n".to_vec(), [400, 400]),
        (head("content-length: -1\r\n"), [400, 400]),
        (head("content-length: 1\r\ncontent-length: 2\r\n"), [400, 400]),
        (head(&"a: b\r\n".repeat(200)), [431, 431]),
        // The answer can be lost where the connection is closed before all is sent.
        (head(&format!("a: {}\r\n", "b".repeat(1 << 20))), [431, 0]),
        (format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(70_000)).into_bytes(), [414, 0]),
        // A length that is only claimed.
        (head("content-length: 1000000000000\r\n"), [408, 408]),
    ] {
        let shown = String::from_utf8_lossy(&sent[..sent.len().min(80)]).into_owned();
        assert!(wanted.contains(&status(&server, &sent)), "{shown}");
    }
    assert!(!text(&server, &body("It is", 1, json!({}))).is_empty());
    nothing_is_left(&server);
}

#[test]
fn a_model_without_a_template_does_not_chat() {
    let server = serve(Options::default());
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let chat = json!({"model": "austen-moe", "messages": messages}).to_string();
    let got = refused(&server, "/v1/chat/completions", chat.as_bytes());
    assert_eq!((got.0, got.1.as_str()), (400, "no_chat_template"));
    for messages in
        [json!([]), json!("Hello"), json!([{"role": "user"}]), json!([{"role": "user", "content": [1]}])]
    {
        let chat = json!({"model": "austen-moe", "messages": messages}).to_string();
        assert_eq!(refused(&server, "/v1/chat/completions", chat.as_bytes()).1, "invalid_type");
    }
}

#[test]
fn other_paths_and_methods_are_refused() {
    let server = serve(Options::default());
    assert_eq!(refused(&server, "/v1/embeddings", b"{}").0, 404);
    assert_eq!(refused(&server, "/metrics", b"{}").0, 405);
    let reply = send(server.address, "GET", "/v1/completions", b"", "").unwrap();
    assert_eq!(
        (reply.status, reply.json().unwrap()["error"]["code"].as_str()),
        (405, Some("method_not_allowed"))
    );
}

#[test]
fn what_the_cache_can_never_hold_is_refused_at_once() {
    let server = serve(Options { budget: 1 << 20, prefixes: 0, ..Options::default() });
    let got =
        refused(&server, "/v1/completions", body(&NOVEL[..1900], 100, json!({})).to_string().as_bytes());
    assert_eq!((got.0, got.1.as_str()), (400, "request_too_large"));
    assert!(!text(&server, &body("It is", 4, json!({}))).is_empty());
    nothing_is_left(&server);
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let server = serve(Options { batch: 1, ..Options::default() });
    let late = |more: Value| {
        let mut asks = body("It is a truth", 2000, json!({"timeout": 0.3}));
        more.as_object().unwrap().iter().for_each(|(name, value)| asks[name] = value.clone());
        complete(server.address, &asks).unwrap()
    };
    let reply = late(json!({}));
    assert_eq!(
        (reply.status, reply.json().unwrap()["error"]["code"].as_str()),
        (408, Some("deadline_exceeded"))
    );
    // A stream that has begun ends with the error.
    let mut reply = late(json!({"stream": true}));
    assert_eq!(reply.status, 200);
    let mut last = String::new();
    while let Some(events) = reply.body.events().unwrap() {
        last = events.last().cloned().unwrap_or(last);
    }
    let last: Value = serde_json::from_str(&last).unwrap();
    assert_eq!(last["error"]["code"], "deadline_exceeded");
    // One that waits behind another is told in time, with a status.
    std::thread::scope(|scope| {
        let first = scope.spawn(|| late(json!({"timeout": 2})));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(late(json!({"stream": true})).status, 408);
        first.join().unwrap();
    });
    nothing_is_left(&server);
}

#[test]
fn requests_above_the_limit_are_turned_away() {
    let server = serve(Options { requests: 1, ..Options::default() });
    let mut open = complete(server.address, &body("It is", 1500, json!({"stream": true}))).unwrap();
    open.body.events().unwrap();
    let reply = complete(server.address, &body("It is", 1, json!({}))).unwrap();
    assert!(reply.headers.contains("retry-after"), "{}", reply.headers);
    assert_eq!(
        (reply.status, reply.json().unwrap()["error"]["code"].as_str()),
        (429, Some("too_many_requests"))
    );
    drop(open);
    nothing_is_left(&server);
    let mut tries = 0..100;
    assert!(tries.any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        complete(server.address, &body("It is", 1, json!({}))).unwrap().status == 200
    }));
    assert_eq!(MOE.name, "austen-moe");
}
