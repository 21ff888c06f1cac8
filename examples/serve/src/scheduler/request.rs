//! A request on its way through the scheduler.

use crate::text::Text;
use pikv::Sequence;
use pikv::save::{Awake, Parkable};
use pikv_engine::common::sample::Sampler;
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// A request as a handler gives it.
pub struct Job {
    /// The prompt, one token at least.
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub sampler: Sampler,
    pub stops: Vec<String>,
    pub deadline: Instant,
    /// Who may find the prompt's prefix again.
    pub scope: Vec<u8>,
    /// Where the answer goes. A receiver that is gone cancels the request. At most `max_tokens + 1` events are sent, so that a client
    /// that does not read holds a bounded amount of memory.
    pub to: UnboundedSender<Event>,
}

/// A message of the scheduler to a handler.
#[derive(Debug)]
pub enum Event {
    /// The next piece of text, perhaps empty.
    Text(String),
    /// Nothing follows.
    Done(Done),
    /// Nothing follows, and the answer is not whole.
    Failed(Fault),
}

#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// "stop" at the end of the text or at a stop string, "length" after `max_tokens`.
    pub reason: &'static str,
    pub prompt: usize,
    /// Tokens of the prompt that the index found.
    pub cached: usize,
    pub completion: usize,
}

/// Why a request ended early.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    Deadline,
    /// The request takes more bytes at its end than the cache has.
    TooLarge {
        needed: u64,
        budget: u64,
    },
    /// The cache refused a step for another reason.
    Cache(String),
}

/// A request that is not finished.
pub struct Request {
    pub id: u64,
    pub job: Job,
    /// The prompt and what was generated.
    pub tokens: Vec<u32>,
    pub text: Text,
    /// Its keys and values. None while it waits for its first turn, or to compute its tokens again.
    pub sequence: Option<Parkable>,
    pub cached: usize,
    /// Whether it shares nothing with the prefix index.
    pub apart: bool,
    /// When it came, and when its last token was given.
    pub came: Instant,
    pub last: Option<Instant>,
}

impl Request {
    pub fn new(id: u64, mut job: Job) -> Request {
        let (text, tokens) = (Text::new(std::mem::take(&mut job.stops)), job.prompt.clone());
        let came = Instant::now();
        Request { id, job, tokens, text, sequence: None, cached: 0, apart: false, came, last: None }
    }

    /// Gives the request to the cache, which parks it for those that came before it.
    pub fn begin(&mut self, sequence: Sequence) {
        let sequence = Parkable::new(sequence);
        sequence.set_priority(-i32::try_from(self.id).unwrap_or(i32::MAX));
        self.sequence = Some(sequence);
    }

    /// Its sequence and the tokens that are to be computed, if it takes part in steps. It is not parked as long as that is held.
    pub fn active(&mut self) -> Option<(Awake<'_>, u32)> {
        let rest = self.rest() as u32;
        Some((self.sequence.as_mut()?.if_awake()?, rest))
    }

    pub fn is_active(&self) -> bool {
        self.sequence.as_ref().is_some_and(|sequence| !sequence.is_parked())
    }

    /// Tokens whose keys and values are there.
    pub fn computed(&self) -> usize {
        self.sequence.as_ref().map_or(0, |sequence| sequence.next_position().0 as usize)
    }

    /// Tokens to compute before the next one can be chosen: 1 while it generates.
    pub fn rest(&self) -> usize {
        self.tokens.len() - self.computed()
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.job.prompt.len()
    }

    /// The end of the answer.
    pub fn done(&self, reason: &'static str) -> Event {
        let (prompt, completion) = (self.job.prompt.len(), self.generated());
        Event::Done(Done { reason, prompt, cached: self.cached, completion })
    }
}
