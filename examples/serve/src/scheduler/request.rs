//! State of a request in the scheduler.

use crate::text::Text;
use pikv::Sequence;
use pikv::save::{Awake, Parkable};
use pikv_engine::common::sample::Sampler;
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// A request from a handler.
pub struct Job {
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub sampler: Sampler,
    pub stops: Vec<String>,
    pub deadline: Instant,
    /// Scope in which the prompt's prefix may be found.
    pub scope: Vec<u8>,
    /// Channel of the answer. Closing the receiver cancels the request. At most `max_tokens + 1` events are sent, so a client that does not
    /// read holds a bounded amount of memory.
    pub to: UnboundedSender<Event>,
}

/// A message from the scheduler to a handler.
#[derive(Debug)]
pub enum Event {
    /// The next piece of text, possibly empty.
    Text(String),
    /// The answer is complete.
    Done(Done),
    /// The answer ended early.
    Failed(Fault),
}

#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// "stop" for the end of the text or a stop string, "length" for `max_tokens`.
    pub reason: &'static str,
    pub prompt: usize,
    /// Tokens of the prompt that the index found.
    pub cached: usize,
    pub completion: usize,
}

/// Reason for an early end.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    Deadline,
    /// The request would need more bytes than the cache has.
    TooLarge {
        needed: u64,
        budget: u64,
    },
    /// The cache refused a step.
    Cache(String),
}

/// A request that is not finished.
pub struct Request {
    pub id: u64,
    pub job: Job,
    /// The prompt and the generated tokens.
    pub tokens: Vec<u32>,
    pub text: Text,
    /// Keys and values; `None` before the first turn, or before its tokens are computed again.
    pub sequence: Option<Parkable>,
    pub cached: usize,
    /// Whether it shares no pages with the prefix index.
    pub apart: bool,
    /// Time of arrival, and of the last generated token.
    pub came: Instant,
    pub last: Option<Instant>,
}

impl Request {
    pub fn new(id: u64, mut job: Job) -> Request {
        let (text, tokens) = (Text::new(std::mem::take(&mut job.stops)), job.prompt.clone());
        let came = Instant::now();
        Request { id, job, tokens, text, sequence: None, cached: 0, apart: false, came, last: None }
    }

    /// Wraps the sequence in a handle; the cache parks the newest request first.
    pub fn begin(&mut self, sequence: Sequence) {
        let sequence = Parkable::new(sequence);
        sequence.set_priority(-i32::try_from(self.id).unwrap_or(i32::MAX));
        self.sequence = Some(sequence);
    }

    /// The sequence and its number of tokens to compute, if it is active. It is not parked while this guard lives.
    pub fn active(&mut self) -> Option<(Awake<'_>, u32)> {
        let rest = self.rest() as u32;
        Some((self.sequence.as_mut()?.if_awake()?, rest))
    }

    pub fn is_active(&self) -> bool {
        self.sequence.as_ref().is_some_and(|sequence| !sequence.is_parked())
    }

    /// Tokens whose keys and values are computed.
    pub fn computed(&self) -> usize {
        self.sequence.as_ref().map_or(0, |sequence| sequence.next_position().0 as usize)
    }

    /// Tokens to compute before the next one can be chosen; 1 while it generates.
    pub fn rest(&self) -> usize {
        self.tokens.len() - self.computed()
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.job.prompt.len()
    }

    /// Last event of a complete answer.
    pub fn done(&self, reason: &'static str) -> Event {
        let (prompt, completion) = (self.job.prompt.len(), self.generated());
        Event::Done(Done { reason, prompt, cached: self.cached, completion })
    }
}
