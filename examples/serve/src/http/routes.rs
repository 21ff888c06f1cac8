//! HTTP endpoints.

use super::answer::Answer;
use super::ask::Ask;
use super::error::{ApiError, json_response};
use super::show;
use crate::Options;
use crate::model::Model;
use crate::scheduler::{Job, Look, Message};
use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// State shared by the handlers.
pub struct Front {
    pub model: Arc<Model>,
    pub options: Options,
    pub scheduler: Sender<Message>,
    pub open: Arc<Semaphore>,
    pub requests: AtomicU64,
    /// Errors sent, by code.
    pub errors: Mutex<BTreeMap<&'static str, u64>>,
}

type Shared = State<Arc<Front>>;

pub fn router(front: Arc<Front>) -> Router {
    Router::new()
        .route("/", get(|| async { Html(show::PAGE) }))
        .route("/state", get(state))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(|front: Shared, request: Request| complete(front, request, false)))
        .route("/v1/chat/completions", post(|front: Shared, request: Request| complete(front, request, true)))
        .fallback(not_found)
        .method_not_allowed_fallback(not_allowed)
        .layer(from_fn_with_state(front.clone(), count_errors))
        .with_state(front)
}

async fn count_errors(State(front): Shared, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if let Some(error) = response.extensions().get::<ApiError>() {
        *front.errors.lock().unwrap_or_else(PoisonError::into_inner).entry(error.code).or_default() += 1;
    }
    response
}

async fn not_found() -> ApiError {
    let known = "GET /, /state, /metrics, /v1/models, POST /v1/completions, /v1/chat/completions are here";
    ApiError::new(StatusCode::NOT_FOUND, "not_found", known)
}

async fn not_allowed() -> ApiError {
    let message = "completions are asked for by POST, everything else by GET";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

async fn complete(State(front): Shared, request: Request, chat: bool) -> Result<Response, ApiError> {
    let Ok(open) = front.open.clone().try_acquire_owned() else {
        let message = format!("{} requests are open; try again", front.options.requests);
        return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", message));
    };
    let came = Instant::now();
    let (parts, body) = request.into_parts();
    let body = tokio::time::timeout(front.options.deadline, to_bytes(body, front.options.body)).await;
    let body = body.map_err(|_| {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "deadline_exceeded", "the body did not come in time")
    })?;
    let body = body.map_err(|_| {
        let message = format!("the body must come whole, and have at most {} bytes", front.options.body);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    })?;
    let ask = Ask::read(&front.model, &body, chat, front.options.deadline)?;
    let Ask { prompt, max_tokens, sampler, stops, timeout, stream, usage } = ask;
    let (to, events) = mpsc::unbounded_channel();
    let (deadline, scope) = (came + timeout, scope(&front.model, &parts.headers));
    let job = Job { prompt, max_tokens, sampler, stops, deadline, scope, to };
    front.scheduler.send(Message::Job(job)).map_err(|_| stopped())?;
    let number = front.requests.fetch_add(1, Relaxed);
    let id = format!("{}-{number}", if chat { "chatcmpl" } else { "cmpl" });
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let answer = Answer { events, _open: open, id, created, model: front.model.name.clone(), chat, usage };
    Ok(if stream { answer.stream().await } else { answer.whole().await })
}

/// Scope of a prompt's prefix: requests with the same API key. Others could tell from the time of a request which prefixes are known.
fn scope(model: &Model, headers: &HeaderMap) -> Vec<u8> {
    let key = headers.get(header::AUTHORIZATION).map_or(&[][..], |key| key.as_bytes());
    // Not the key itself, since scopes are saved.
    [model.name.as_bytes(), &[0], model.revision.as_bytes(), &[0], blake3::hash(key).as_bytes()].concat()
}

fn stopped() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "stopped", "the scheduler stopped")
}

async fn models(State(front): Shared) -> Response {
    let model = json!({"id": front.model.name, "object": "model", "created": 0, "owned_by": "pikv"});
    json_response(&json!({"object": "list", "data": [model]}))
}

async fn look(front: &Front) -> Result<Arc<Look>, ApiError> {
    let (to, from) = oneshot::channel();
    front.scheduler.send(Message::Look(to)).map_err(|_| stopped())?;
    from.await.map_err(|_| stopped())
}

async fn state(State(front): Shared) -> Result<Response, ApiError> {
    Ok(json_response(&show::json(&*look(&front).await?)))
}

async fn metrics(State(front): Shared) -> Result<Response, ApiError> {
    let look = look(&front).await?;
    let errors = front.errors.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let text = show::prometheus(&look, &errors);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}
