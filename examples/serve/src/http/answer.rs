//! Builds answers from the scheduler's events, whole or as server-sent events.

use super::error::{ApiError, json_response};
use crate::scheduler::{Done, Event};
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedReceiver;

/// An answer under way: its source and its form.
pub struct Answer {
    pub events: UnboundedReceiver<Event>,
    /// Permit of an open request, released when the answer is sent or the client disconnects.
    pub _open: OwnedSemaphorePermit,
    pub id: String,
    pub created: u64,
    pub model: String,
    pub chat: bool,
    pub usage: bool,
}

impl Answer {
    /// An object with one choice: `chat` for a chat, `text` for a completion.
    fn object(&self, kind: &str, chat: (&str, Value), text: Option<&str>, reason: Option<&str>) -> Value {
        let (object, (name, value)) = match self.chat {
            true => (kind, chat),
            false => ("text_completion", ("text", text.unwrap_or_default().into())),
        };
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": reason});
        choice[name] = value;
        let (id, created, model) = (&self.id, self.created, &self.model);
        json!({"id": id, "object": object, "created": created, "model": model, "choices": [choice]})
    }

    /// Waits for the whole answer.
    pub async fn whole(mut self) -> Response {
        let mut all = String::new();
        loop {
            match next(self.events.recv().await) {
                Event::Text(text) => all.push_str(&text),
                Event::Failed(fault) => return ApiError::from(fault).into_response(),
                Event::Done(done) => {
                    let message = ("message", json!({"role": "assistant", "content": all}));
                    let mut answer = self.object("chat.completion", message, Some(&all), Some(done.reason));
                    answer["usage"] = usage(&done);
                    return json_response(&answer);
                }
            }
        }
    }

    /// Streams server-sent events. A failure before the first token gets an HTTP status of its own.
    pub async fn stream(mut self) -> Response {
        let first = match next(self.events.recv().await) {
            Event::Failed(fault) => return ApiError::from(fault).into_response(),
            first => first,
        };
        let body = Body::from_stream(Lines { answer: self, first: Some(first), over: false });
        let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        (StatusCode::OK, headers, body).into_response()
    }

    /// Lines of an event, and whether it is the last.
    fn lines(&self, event: Event) -> (String, bool) {
        let choice = |text: Option<&str>, reason: Option<&str>| {
            let delta = text.map_or_else(|| json!({}), |text| json!({"role": "assistant", "content": text}));
            self.object("chat.completion.chunk", ("delta", delta), text, reason)
        };
        match event {
            Event::Text(text) => (line(&choice(Some(&text), None)), false),
            Event::Failed(fault) => (line(&ApiError::from(fault).json()), true),
            Event::Done(done) => {
                let mut lines = line(&choice(None, Some(done.reason)));
                if self.usage {
                    let mut last = choice(None, None);
                    last["choices"] = json!([]);
                    last["usage"] = usage(&done);
                    lines.push_str(&line(&last));
                }
                (lines + "data: [DONE]\n\n", true)
            }
        }
    }
}

/// The event, or a failure if the scheduler's thread has ended.
fn next(event: Option<Event>) -> Event {
    event.unwrap_or_else(|| Event::Failed(crate::scheduler::Fault::Cache("the scheduler stopped".into())))
}

fn line(value: &Value) -> String {
    format!("data: {value}\n\n")
}

fn usage(done: &Done) -> Value {
    json!({
        "prompt_tokens": done.prompt,
        "completion_tokens": done.completion,
        "total_tokens": done.prompt + done.completion,
        "prompt_tokens_details": {"cached_tokens": done.cached},
    })
}

/// Body of a stream. The server drops it when the client disconnects, which cancels the request.
struct Lines {
    answer: Answer,
    first: Option<Event>,
    over: bool,
}

impl Stream for Lines {
    type Item = Result<String, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        let event = match self.first.take() {
            Some(first) => first,
            None => next(ready!(self.answer.events.poll_recv(context))),
        };
        let (lines, over) = self.answer.lines(event);
        self.over = over;
        Poll::Ready(Some(Ok(lines)))
    }
}
