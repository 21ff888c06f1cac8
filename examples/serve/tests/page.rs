//! Metrics, and the page that shows where bytes are.

use crate::{NOVEL, body, serve, text};
use pikv_serve::client::{complete, send};
use pikv_serve::{Options, Server};
use serde_json::{Value, json};

fn get(server: &Server, path: &str) -> String {
    let reply = send(server.address, "GET", path, b"", "").unwrap();
    assert_eq!(reply.status, 200, "{path}");
    reply.text().unwrap()
}

#[test]
fn the_page_reads_only_what_the_server_says() {
    let server = serve(Options::default());
    let mut open = complete(server.address, &body(&NOVEL[..500], 1000, json!({"stream": true}))).unwrap();
    open.body.events().unwrap();
    let state: Value = serde_json::from_str(&get(&server, "/state")).unwrap();
    assert_eq!(state["requests"][0]["state"], "answer", "{state}");
    let row = &state["requests"][0];
    assert!(row["ring"].as_u64() > Some(0) && row["filed"].as_u64() > Some(0), "{row}");
    let experts: u64 = state["experts"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
    assert_eq!(Some(experts), row["filed"].as_u64());
    assert!(state["taken"].as_u64() >= row["ring"].as_u64());

    let page = get(&server, "/");
    let script = page.split("<script>").nth(1).unwrap();
    let of = |object: &str, value: &Value| {
        let mut fields = 0;
        for (at, _) in script.match_indices(&format!("{object}.")) {
            // The name must begin there: "row." is no part of "throw.".
            if script[..at]
                .chars()
                .next_back()
                .is_some_and(|before| before.is_alphanumeric() || before == '.')
            {
                continue;
            }
            let rest = &script[at + object.len() + 1..];
            let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            assert!(value.get(&name).is_some(), "{object}.{name} is not in {value}");
            fields += 1;
        }
        assert!(fields > 2, "{object}: {fields}");
    };
    of("state", &state);
    of("row", row);
    of("tier", &state["tiers"][0]);
    of("prefixes", &state["prefixes"]);
    of("counts", &state["counts"]);
    // Nothing is fetched from elsewhere.
    assert!(!page.contains("http"), "the page names another server");
}

#[test]
fn metrics_are_of_prometheus_form_and_count() {
    let server = serve(Options::default());
    text(&server, &body(&NOVEL[..100], 5, json!({})));
    complete(server.address, &json!({"model": "x"})).unwrap();
    server.clear_prefixes();
    let metrics = get(&server, "/metrics");
    for line in metrics.lines() {
        let parts: Vec<&str> = line.split(' ').collect();
        match parts[0] {
            "#" => assert!(["HELP", "TYPE"].contains(&parts[1]), "{line}"),
            name => {
                assert!(name.starts_with("pikv_") && parts.len() == 2, "{line}");
                parts[1].parse::<f64>().unwrap();
            }
        }
    }
    let has = |line: &str| assert!(metrics.lines().any(|other| other == line), "{line} is not in\n{metrics}");
    has("pikv_generated_total 5");
    has("pikv_finished_total 1");
    has("pikv_rows_total 104");
    has("pikv_first_token_seconds_count 1");
    has("pikv_between_tokens_seconds_count 4");
    has("pikv_errors_total{code=\"model_not_found\"} 1");
    has("pikv_requests_answer 0");
    has("pikv_prefixes_asked_tokens 100");
    has(&format!("pikv_budget {}", Options::default().budget));
    has("pikv_experts{of=\"7\"} 0");
    has("pikv_tiers_bytes{of=\"0\"} 0");
}
