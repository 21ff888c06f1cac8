//! Parses and checks a request's body. A field that this server does not support is refused unless it has its neutral value.

use super::error::ApiError;
use crate::model::Model;
use pikv_engine::common::sample::Sampler;
use serde_json::{Map, Value, json};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Most stop strings of a request, and most bytes of each.
const STOPS: usize = 4;
const STOP_BYTES: usize = 256;

type Result<T = ()> = std::result::Result<T, ApiError>;

/// A checked body.
pub struct Ask {
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub sampler: Sampler,
    pub stops: Vec<String>,
    pub timeout: Duration,
    pub stream: bool,
    /// Whether a stream ends with token counts.
    pub usage: bool,
}

/// Fields that are read, or that do not affect the answer.
const READ: &str = "model prompt messages max_tokens max_completion_tokens temperature top_p seed stop stream \
                    stream_options timeout user";

impl Ask {
    /// Parses a body. `chat` is true for the chat endpoint; `longest` is the longest time that a request may take.
    ///
    /// # Errors
    /// Names the wrong field and the accepted values.
    pub fn read(model: &Model, body: &[u8], chat: bool, longest: Duration) -> Result<Ask> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::field("", "invalid_json", format!("the body is not JSON: {error}")))?;
        let Value::Object(fields) = body else {
            return Err(ApiError::field("", "invalid_json", "the body must be a JSON object"));
        };
        // Unsupported fields of OpenAI's API, with their neutral values.
        let idle = json!({
            "n": 1, "best_of": 1, "echo": false, "logprobs": false, "logit_bias": {}, "presence_penalty": 0,
            "frequency_penalty": 0, "suffix": "",
        });
        for (name, value) in &fields {
            let read = READ.split_whitespace().any(|read| read == name);
            let nothing = value.is_null() || idle.get(name).is_some_and(|idle| same(idle, value));
            let name = &short(name);
            let message = || format!("{name}: this server cannot act on it; leave it out");
            ensure(read || nothing, name, "unsupported_parameter", message)?;
        }
        check_model(model, &fields)?;
        let prompt = if chat { messages(model, &fields)? } else { prompt(model, &fields)? };
        let field = if chat { "messages" } else { "prompt" };
        let message = || format!("{field}: must have one token at least");
        ensure(!prompt.is_empty(), field, "empty_prompt", message)?;
        let room = model.context.saturating_sub(prompt.len());
        let asked = whole(&fields, "max_tokens")?.or(whole(&fields, "max_completion_tokens")?);
        let max_tokens = asked.unwrap_or(if chat { 128.min(room.max(1) as u64) } else { 16 });
        let message = || "max_tokens: must be at least 1".into();
        ensure(max_tokens > 0, "max_tokens", "invalid_value", message)?;
        let (context, got) = (model.context, prompt.len());
        let message = || format!("{got} tokens of prompt and {max_tokens} more exceed the model's {context}");
        ensure(max_tokens <= room as u64, "max_tokens", "context_length_exceeded", message)?;
        let temperature = number(&fields, "temperature", 0.0, 2.0)?.unwrap_or(1.0) as f32;
        let top_p = number(&fields, "top_p", 0.0, 1.0)?.unwrap_or(1.0);
        let seed = whole(&fields, "seed")?.unwrap_or_else(|| RandomState::new().hash_one(0));
        let timeout = number(&fields, "timeout", 0.001, longest.as_secs_f64())?;
        Ok(Ask {
            prompt,
            max_tokens: max_tokens as usize,
            sampler: Sampler::new(temperature, top_p, seed),
            stops: stops(&fields)?,
            timeout: timeout.map_or(longest, Duration::from_secs_f64),
            stream: flag(&fields, "stream")?,
            usage: self::field(&fields, "stream_options", "an object", Value::as_object)?
                .map_or(Ok(false), |options| flag(options, "include_usage"))?,
        })
    }
}

type Fields = Map<String, Value>;

/// Whether two values are equal, with 0 equal to 0.0.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

/// Refuses the value of a field unless `holds`.
fn ensure(holds: bool, param: &str, code: &'static str, message: impl FnOnce() -> String) -> Result {
    if holds { Ok(()) } else { Err(ApiError::field(param, code, message())) }
}

fn wrong(param: &str, must: &str) -> ApiError {
    ApiError::field(param, "invalid_type", format!("{param}: must be {must}"))
}

/// Reads a field with `read`; `None` if it is missing or null.
fn field<'f, T>(
    fields: &'f Fields,
    name: &str,
    must: &str,
    read: impl FnOnce(&'f Value) -> Option<T>,
) -> Result<Option<T>> {
    let value = fields.get(name).filter(|value| !value.is_null());
    value.map(|value| read(value).ok_or_else(|| wrong(name, must))).transpose()
}

fn whole(fields: &Fields, name: &str) -> Result<Option<u64>> {
    field(fields, name, "an integer, 0 or more", Value::as_u64)
}

fn number(fields: &Fields, name: &str, least: f64, most: f64) -> Result<Option<f64>> {
    let must = format!("a number from {least} to {most}");
    field(fields, name, &must, |value| value.as_f64().filter(|number| (least..=most).contains(number)))
}

fn flag(fields: &Fields, name: &str) -> Result<bool> {
    Ok(field(fields, name, "true or false", Value::as_bool)?.unwrap_or(false))
}

/// Shortens text of a client for an error message.
fn short(text: &str) -> String {
    text.chars().take(64).collect()
}

fn check_model(model: &Model, fields: &Fields) -> Result {
    let must = format!("the string {:?}", model.name);
    let name = field(fields, "model", &must, Value::as_str)?.ok_or_else(|| wrong("model", &must))?;
    if name == model.name {
        return Ok(());
    }
    let message = format!("model: {:?} is not here; {:?} is", short(name), model.name);
    let status = axum::http::StatusCode::NOT_FOUND;
    Err(ApiError { status, ..ApiError::field("model", "model_not_found", message) })
}

/// Reads a prompt: a text or tokens.
fn prompt(model: &Model, fields: &Fields) -> Result<Vec<u32>> {
    let must = "a string, or an array of the vocabulary's tokens";
    let tokens = field(fields, "prompt", must, |value| match value {
        Value::String(text) => Some(model.encode(text)),
        Value::Array(_) => Some(Ok(serde_json::from_value(value.clone()).ok()?)),
        _ => None,
    })?;
    known(model, "prompt", tokens.ok_or_else(|| wrong("prompt", must))?)
}

/// Checks that the tokenizer accepted a text and that all tokens are in the vocabulary.
fn known(model: &Model, param: &str, tokens: std::result::Result<Vec<u32>, String>) -> Result<Vec<u32>> {
    let tokens =
        tokens.map_err(|error| ApiError::field(param, "invalid_text", format!("{param}: {error}")))?;
    let largest = tokens.iter().max().map_or(0, |token| *token as usize);
    let message = || format!("{param}: token {largest} of a vocabulary of {}", model.vocab);
    ensure(largest < model.vocab, param, "invalid_token", message)?;
    Ok(tokens)
}

fn messages(model: &Model, fields: &Fields) -> Result<Vec<u32>> {
    let must = "an array of objects, each with the strings role and content";
    let message = |value: &Value| {
        let text = |name| value.get(name)?.as_str().map(String::from);
        Some((text("role")?, text("content")?))
    };
    let all = |value: &Value| value.as_array()?.iter().map(message).collect::<Option<Vec<_>>>();
    let messages = field(fields, "messages", must, all)?.filter(|messages| !messages.is_empty());
    let messages = messages.ok_or_else(|| wrong("messages", must))?;
    for (role, _) in &messages {
        let message = || format!("messages: role {:?}; must be system, user or assistant", short(role));
        ensure(["system", "user", "assistant"].contains(&&**role), "messages", "invalid_value", message)?;
    }
    let tokens = model.encode_chat(&messages).ok_or_else(|| {
        let message = format!("{} has no chat template; use /v1/completions", model.name);
        ApiError::field("model", "no_chat_template", message)
    })?;
    known(model, "messages", tokens)
}

fn stops(fields: &Fields) -> Result<Vec<String>> {
    let must = format!("a string, or an array of up to {STOPS} strings, of 1 to {STOP_BYTES} bytes each");
    let stops = field(fields, "stop", &must, |value| {
        let stops: Vec<String> = match value {
            Value::String(stop) => vec![stop.clone()],
            value => serde_json::from_value(value.clone()).ok()?,
        };
        let fits = |stop: &String| (1..=STOP_BYTES).contains(&stop.len());
        (stops.len() <= STOPS && stops.iter().all(fits)).then_some(stops)
    })?;
    Ok(stops.unwrap_or_default())
}
