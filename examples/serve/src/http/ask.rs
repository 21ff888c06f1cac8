//! The fields of a request's body, checked. A field that this server cannot act on is refused, unless it has the value that means nothing.

use super::error::ApiError;
use crate::model::Model;
use pikv_engine::common::sample::Sampler;
use serde_json::{Map, Value, json};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Stop strings of a request, and bytes of each.
const STOPS: usize = 4;
const STOP_BYTES: usize = 256;

/// A body that was checked.
pub struct Ask {
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub sampler: Sampler,
    pub stops: Vec<String>,
    pub timeout: Duration,
    pub stream: bool,
    /// Whether a stream ends with the number of tokens.
    pub usage: bool,
}

/// Fields that are read, or say nothing about the answer.
const READ: &str = "model prompt messages max_tokens max_completion_tokens temperature top_p seed stop stream \
                    stream_options timeout user";

/// Fields of OpenAI's with the value that asks for nothing.
fn idle() -> Value {
    json!({
        "n": 1, "best_of": 1, "echo": false, "logprobs": false, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0, "suffix": "",
    })
}

impl Ask {
    /// Reads a body. `chat` says which of the endpoints it came to, `longest` is the time that a request may take.
    ///
    /// # Errors
    /// The field that is wrong, and what it must be.
    pub fn read(model: &Model, body: &[u8], chat: bool, longest: Duration) -> Result<Ask, ApiError> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::field("", "invalid_json", format!("the body is not JSON: {error}")))?;
        let Value::Object(fields) = body else {
            return Err(ApiError::field("", "invalid_json", "the body must be a JSON object"));
        };
        let idle = idle();
        for (name, value) in &fields {
            let read = READ.split_whitespace().any(|read| read == name);
            let nothing = value.is_null() || idle.get(name).is_some_and(|idle| same(idle, value));
            if !read && !nothing {
                // A name as long as the body would come back whole.
                let name: String = name.chars().take(64).collect();
                let message = format!("{name}: this server cannot act on it; leave it out");
                return Err(ApiError::field(&name, "unsupported_parameter", message));
            }
        }
        check_model(model, &fields)?;
        let prompt = if chat { messages(model, &fields)? } else { prompt(model, &fields)? };
        if prompt.is_empty() {
            let field = if chat { "messages" } else { "prompt" };
            return Err(ApiError::field(
                field,
                "empty_prompt",
                format!("{field}: must have one token at least"),
            ));
        }
        let room = model.context.saturating_sub(prompt.len());
        let asked = whole(&fields, "max_tokens")?.or(whole(&fields, "max_completion_tokens")?);
        let max_tokens = asked.unwrap_or(if chat { 128.min(room.max(1) as u64) } else { 16 });
        if max_tokens == 0 {
            return Err(ApiError::field("max_tokens", "invalid_value", "max_tokens: must be at least 1"));
        }
        if max_tokens > room as u64 {
            let (context, got) = (model.context, prompt.len());
            let message =
                format!("{got} tokens of prompt and {max_tokens} to come; the model has {context} in all");
            return Err(ApiError::field("max_tokens", "context_length_exceeded", message));
        }
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
            usage: match fields.get("stream_options") {
                Some(Value::Object(options)) => flag(options, "include_usage")?,
                None | Some(Value::Null) => false,
                Some(_) => return Err(wrong("stream_options", "an object")),
            },
        })
    }
}

/// Whether two values mean the same: 0 and 0.0 do.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

fn wrong(param: &str, must: &str) -> ApiError {
    ApiError::field(param, "invalid_type", format!("{param}: must be {must}"))
}

fn whole(fields: &Map<String, Value>, name: &str) -> Result<Option<u64>, ApiError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| wrong(name, "an integer, 0 or more")),
    }
}

fn number(fields: &Map<String, Value>, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(wrong(name, &format!("a number from {least} to {most}"))),
        },
    }
}

fn flag(fields: &Map<String, Value>, name: &str) -> Result<bool, ApiError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(value) => value.as_bool().ok_or_else(|| wrong(name, "true or false")),
    }
}

fn check_model(model: &Model, fields: &Map<String, Value>) -> Result<(), ApiError> {
    match fields.get("model") {
        Some(Value::String(name)) if *name == model.name => Ok(()),
        Some(Value::String(name)) => {
            let name: String = name.chars().take(64).collect();
            let message = format!("model: {name:?} is not here; {:?} is", model.name);
            let status = axum::http::StatusCode::NOT_FOUND;
            Err(ApiError { status, ..ApiError::field("model", "model_not_found", message) })
        }
        _ => Err(wrong("model", &format!("the string {:?}", model.name))),
    }
}

/// A prompt is a text or tokens.
fn prompt(model: &Model, fields: &Map<String, Value>) -> Result<Vec<u32>, ApiError> {
    let must = "a string, or an array of the vocabulary's tokens";
    match fields.get("prompt") {
        Some(Value::String(text)) => {
            known(model, "prompt", model.encode(text).map_err(|error| unreadable("prompt", error))?)
        }
        Some(Value::Array(tokens)) => {
            let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
            let tokens: Option<Vec<u32>> = tokens.iter().map(token).collect();
            known(model, "prompt", tokens.ok_or_else(|| wrong("prompt", must))?)
        }
        _ => Err(wrong("prompt", must)),
    }
}

fn known(model: &Model, param: &str, tokens: Vec<u32>) -> Result<Vec<u32>, ApiError> {
    match tokens.iter().find(|token| **token as usize >= model.vocab) {
        Some(token) => {
            let message = format!("{param}: token {token} of a vocabulary of {}", model.vocab);
            Err(ApiError::field(param, "invalid_token", message))
        }
        None => Ok(tokens),
    }
}

fn unreadable(param: &str, error: String) -> ApiError {
    ApiError::field(param, "invalid_text", format!("{param}: {error}"))
}

fn messages(model: &Model, fields: &Map<String, Value>) -> Result<Vec<u32>, ApiError> {
    let must = "an array of objects, each with the strings role and content";
    let Some(Value::Array(messages)) = fields.get("messages") else { return Err(wrong("messages", must)) };
    let message = |value: &Value| {
        let field = |name| value.get(name)?.as_str().map(String::from);
        Some((field("role")?, field("content")?))
    };
    let messages: Option<Vec<_>> = messages.iter().map(message).collect();
    let messages = messages.filter(|messages| !messages.is_empty()).ok_or_else(|| wrong("messages", must))?;
    if let Some((role, _)) =
        messages.iter().find(|(role, _)| !["system", "user", "assistant"].contains(&role.as_str()))
    {
        let role: String = role.chars().take(64).collect();
        let message = format!("messages: role {role:?}; must be system, user or assistant");
        return Err(ApiError::field("messages", "invalid_value", message));
    }
    match model.encode_chat(&messages) {
        Some(tokens) => known(model, "messages", tokens.map_err(|error| unreadable("messages", error))?),
        None => {
            let message = format!("{} has no chat template; use /v1/completions", model.name);
            Err(ApiError::field("model", "no_chat_template", message))
        }
    }
}

fn stops(fields: &Map<String, Value>) -> Result<Vec<String>, ApiError> {
    let stops: Option<Vec<String>> = match fields.get("stop") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::String(stop)) => Some(vec![stop.clone()]),
        Some(Value::Array(stops)) => stops.iter().map(|stop| stop.as_str().map(String::from)).collect(),
        Some(_) => None,
    };
    let fits = |stop: &String| (1..=STOP_BYTES).contains(&stop.len());
    stops.filter(|stops| stops.len() <= STOPS && stops.iter().all(fits)).ok_or_else(|| {
        wrong(
            "stop",
            &format!("a string, or an array of up to {STOPS} strings, of 1 to {STOP_BYTES} bytes each"),
        )
    })
}
