//! Memory usage as JSON for the page and as text for Prometheus.

use crate::scheduler::Look;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The page at `/`, which reads `/state`.
pub const PAGE: &str = include_str!("page.html");

/// Numbers for the page, in bytes, tokens and seconds.
pub fn json(look: &Look) -> Value {
    let tiers = look.usage.tiers.iter();
    let tiers = tiers.map(|tier| json!({"name": tier.name, "bytes": tier.bytes, "capacity": tier.capacity}));
    let prefixes = look.prefixes.map(|p| {
        json!({
            "bytes": p.bytes, "lower": p.lower, "boundaries": p.boundaries, "lookups": p.lookups, "hits": p.hits,
            "asked_tokens": p.asked_tokens, "hit_tokens": p.hit_tokens, "evictions": p.evictions,
        })
    });
    let counts: Map<String, Value> =
        look.counts.named().into_iter().map(|(name, _, count)| (name.into(), count.into())).collect();
    json!({
        "taken": look.usage.taken,
        "budget": look.usage.budget,
        "tiers": tiers.collect::<Vec<_>>(),
        "experts": look.experts,
        "prefixes": prefixes,
        "fetched": look.fetched,
        "requests": look.rows,
        "counts": counts,
    })
}

/// The same numbers in Prometheus' text format: `pikv_` and the path to a number, with an element of a list as a label.
pub fn prometheus(look: &Look, errors: &BTreeMap<&'static str, u64>) -> String {
    let mut text = String::new();
    let mut state = json(look);
    let mut states = json!({"waiting": 0, "prompt": 0, "answer": 0, "parked": 0});
    for row in &look.rows {
        let count = &mut states[row["state"].as_str().unwrap_or_default()];
        *count = (count.as_u64().unwrap_or(0) + 1).into();
    }
    state["requests"] = states;
    numbers("pikv", "", &state, &mut text);
    for (name, help, count) in look.counts.named() {
        let name = format!("pikv_{name}_total");
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {count}");
    }
    let _ = writeln!(
        text,
        "# HELP pikv_errors_total Errors that were sent, by code.\n# TYPE pikv_errors_total counter"
    );
    for (code, count) in errors {
        let _ = writeln!(text, "pikv_errors_total{{code=\"{code}\"}} {count}");
    }
    for (name, times) in
        [("first_token", look.counts.first_token), ("between_tokens", look.counts.between_tokens)]
    {
        let (name, sum, count) = (format!("pikv_{name}_seconds"), times.sum.as_secs_f64(), times.count);
        let _ = writeln!(text, "# TYPE {name} summary\n{name}_sum {sum}\n{name}_count {count}");
    }
    text
}

/// Writes the numbers in `value`, under names that begin with `name`, with the label `of`.
fn numbers(name: &str, of: &str, value: &Value, text: &mut String) {
    match value {
        // Counts are written with their help texts.
        Value::Object(fields) => {
            fields.iter().filter(|(field, _)| *field != "counts").for_each(|(field, value)| {
                numbers(&format!("{name}_{field}"), of, value, text);
            })
        }
        Value::Array(list) => list.iter().enumerate().for_each(|(at, value)| {
            numbers(name, &format!("{{of=\"{at}\"}}"), value, text);
        }),
        Value::Number(number) => {
            let _ = writeln!(text, "{name}{of} {number}");
        }
        _ => {}
    }
}
