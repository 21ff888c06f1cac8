//! Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.

use crate::scheduler::Fault;
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error for a client.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    /// Machine-readable code.
    pub code: &'static str,
    /// Name of the wrong field.
    pub param: Option<String>,
    pub message: String,
}

impl ApiError {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, code, param: None, message: message.into() }
    }

    /// An error about the value of a field.
    pub fn field(param: &str, code: &'static str, message: impl Into<String>) -> ApiError {
        let param = Some(param.into());
        ApiError { param, ..ApiError::new(StatusCode::BAD_REQUEST, code, message) }
    }

    pub fn json(&self) -> Value {
        let kind = match self.status.as_u16() {
            408 | 500.. => "server_error",
            429 => "rate_limit_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<Fault> for ApiError {
    fn from(fault: Fault) -> ApiError {
        match fault {
            Fault::Deadline => {
                let message = "the request timed out; ask for fewer tokens, or for more time with `timeout`";
                ApiError::new(StatusCode::REQUEST_TIMEOUT, "deadline_exceeded", message)
            }
            Fault::TooLarge { needed, budget } => {
                let message = format!("prompt and max_tokens need {needed} bytes, the cache has {budget}");
                ApiError::new(StatusCode::BAD_REQUEST, "request_too_large", message)
            }
            Fault::Cache(message) => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "cache_error", message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(&self.json());
        *response.status_mut() = self.status;
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        // For the layer that counts errors by response.
        response.extensions_mut().insert(self);
        response
    }
}

pub fn json_response(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], Body::from(value.to_string())).into_response()
}
