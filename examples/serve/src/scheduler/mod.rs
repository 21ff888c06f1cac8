//! Chooses the requests of each step. One thread owns the model, the cache and all sequences; requests arrive over a channel.
//!
//! A step has the next token of every generating request, and chunks of prompts in order of arrival. A request is admitted when the rest of
//! its prompt fits beside the needs of the active ones. If a step still exceeds the budget, because answers grow, the cache parks the
//! newest requests in host memory; if that is full, their tokens are dropped and computed again later. The oldest is never parked, so every
//! request ends.

mod kept;
mod look;
mod request;

pub use look::Look;
pub use request::{Done, Event, Fault, Job};

use crate::model::Model;
use crate::{Options, Store};
use kept::Kept;
use look::Counts;
use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::save::{Awake, Parkable};
use pikv::{Cache, Error};
use pikv_engine::moe::batch::Batch;
use request::Request;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Tokens between checkpoints, for caches that find prefixes only at checkpoints.
const CHECKPOINT: usize = 256;
/// Largest age of the answer to [`Message::Look`]: computing it takes O(pages).
const LOOK: Duration = Duration::from_millis(200);

/// A message to the scheduler.
pub enum Message {
    Job(Job),
    /// Asks for memory usage and counts.
    Look(oneshot::Sender<Arc<Look>>),
    /// Drops all prefixes that no request reads, and returns fresh usage.
    Clear(oneshot::Sender<Arc<Look>>),
}

/// State of the thread.
struct Scheduler {
    model: Arc<Model>,
    options: Options,
    cache: Cache,
    index: Option<PrefixIndex>,
    kept: Option<Kept>,
    /// Unfinished requests, the oldest first.
    requests: Vec<Request>,
    next_id: u64,
    counts: Counts,
    looked: Option<(Instant, Arc<Look>)>,
    logits: Vec<f32>,
}

/// Starts the thread. It ends when all senders are dropped.
///
/// # Errors
/// If the cache's configuration is refused, the thread cannot be started, or prefixes cannot be kept.
pub fn start(model: Arc<Model>, options: Options) -> Result<Sender<Message>, Box<dyn std::error::Error>> {
    let (sender, receiver) = channel();
    let cache = model.cache(&options)?;
    let index = (options.prefixes > 0).then(|| PrefixIndex::new(&cache, options.prefixes));
    let kept = match (&options.keep, &index) {
        (Some(folder), Some(index)) => Some(Kept::open(folder, options.prefixes, &cache, index)?),
        (Some(_), None) => return Err("prefixes are kept only with an index".into()),
        (None, _) => None,
    };
    let (requests, counts, logits) = Default::default();
    let scheduler =
        Scheduler { model, options, cache, index, kept, requests, next_id: 0, counts, looked: None, logits };
    std::thread::Builder::new().name("scheduler".into()).spawn(move || scheduler.run(&receiver))?;
    Ok(sender)
}

impl Scheduler {
    fn run(mut self, from: &Receiver<Message>) {
        loop {
            if self.requests.is_empty() {
                let Ok(message) = from.recv() else { return };
                self.take(message);
            }
            while let Ok(message) = from.try_recv() {
                self.take(message);
            }
            self.drop_gone();
            self.admit();
            self.step();
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Job(job) => {
                let needed = self.bytes_at_most(job.prompt.len() + job.max_tokens);
                if needed > self.options.budget {
                    self.counts.failed += 1;
                    let _ =
                        job.to.send(Event::Failed(Fault::TooLarge { needed, budget: self.options.budget }));
                    return;
                }
                self.counts.requests += 1;
                self.requests.push(Request::new(self.next_id, job));
                self.next_id += 1;
            }
            Message::Look(to) => {
                let last = self.looked.clone().filter(|(at, _)| at.elapsed() < LOOK);
                let _ = to.send(last.map_or_else(|| self.look(), |(_, look)| look));
            }
            Message::Clear(to) => {
                self.drop_gone();
                self.index.iter().for_each(PrefixIndex::clear);
                let _ = to.send(self.look());
            }
        }
    }

    fn look(&mut self) -> Arc<Look> {
        let index = self.index.as_ref().map(PrefixIndex::usage);
        let look = Arc::new(Look::new(&self.cache, index, &mut self.requests, self.counts.clone()));
        self.looked = Some((Instant::now(), look.clone()));
        look
    }

    /// The most bytes that a sequence takes to grow to `tokens` tokens, one a step.
    fn bytes_at_most(&self, tokens: usize) -> u64 {
        let tokens = tokens.try_into().unwrap_or(u32::MAX);
        let layers = 0..self.cache.config().layers.len();
        let held: u64 = layers.map(|layer| self.cache.bytes_at_most(layer, tokens).unwrap_or(u64::MAX)).sum();
        held.saturating_add(self.fresh_bytes(1))
    }

    /// Bytes that a step reserves for `tokens` tokens of an empty sequence.
    fn fresh_bytes(&self, tokens: u32) -> u64 {
        self.cache.step_bytes([(&self.cache.sequence(), tokens)]).map_or(u64::MAX, |bytes| bytes.needed)
    }

    /// Drops requests of disconnected clients and those past their deadline, and frees their pages.
    fn drop_gone(&mut self) {
        let (now, counts) = (Instant::now(), &mut self.counts);
        self.requests.retain(|request| {
            let (gone, late) = (request.job.to.is_closed(), now >= request.job.deadline);
            counts.hung_up += u64::from(gone);
            counts.failed += u64::from(late && !gone);
            if late {
                let _ = request.job.to.send(Event::Failed(Fault::Deadline));
            }
            !gone && !late
        });
    }

    /// Starts and wakes requests, the oldest first, while the rest of their prompts fits beside the needs of the active ones.
    fn admit(&mut self) {
        for at in 0..self.requests.len() {
            let active = self.requests.iter().filter(|request| request.is_active()).count();
            if self.requests[at].is_active() {
                continue;
            }
            if active >= self.options.batch || !self.admit_one(at, active == 0) {
                return;
            }
        }
    }

    /// Makes a request active if there is room; `alone`: no other is active, so it is admitted in any case.
    fn admit_one(&mut self, at: usize, alone: bool) -> bool {
        let request = &mut self.requests[at];
        let fresh = request.sequence.is_none();
        if fresh {
            let scope = PrefixScope::new(&request.job.scope);
            let index = self.index.as_ref().filter(|_| !request.apart);
            let found = index.and_then(|index| index.find(&scope, &request.tokens).ok());
            request.begin(found.unwrap_or_else(|| self.cache.sequence()));
        }
        if !alone && !self.has_room(at) {
            // A waiting request keeps no sequence.
            self.requests[at].sequence.take_if(|_| fresh);
            return false;
        }
        let request = &mut self.requests[at];
        if fresh && request.generated() == 0 {
            request.cached = request.computed();
        }
        match request.sequence.as_mut().map(|sequence| sequence.awake().map(drop)) {
            Some(Ok(())) => self.counts.parked += u64::from(!fresh),
            Some(Err(_)) if !alone => return false,
            // A sequence that cannot be read back is computed again.
            _ => {
                self.counts.recomputed += 1;
                request.begin(self.cache.sequence());
            }
        }
        true
    }

    /// Whether the rest of a request's prompt fits beside the needs of the active ones.
    fn has_room(&mut self, at: usize) -> bool {
        let parked = self.requests[at].sequence.as_ref().map_or(0, Parkable::bytes_to_wake);
        let woken = if parked > 0 { parked + self.fresh_bytes(self.requests[at].rest() as u32) } else { 0 };
        let active: Vec<(Awake<'_>, u32)> = self.requests.iter_mut().filter_map(Request::active).collect();
        let bytes = self.cache.step_bytes(active.iter().map(|(sequence, rest)| (&**sequence, *rest)));
        // A step frees prefixes that no request reads before it is refused.
        let idle = self.index.as_ref().map_or(0, |index| index.usage().bytes - index.usage().lower);
        bytes.is_ok_and(|bytes| bytes.needed.saturating_add(woken) <= bytes.available.saturating_add(idle))
    }

    /// Requests of the next step with their numbers of tokens: one for each that generates, then chunks of prompts.
    fn plan(&self, most: usize) -> Vec<(usize, usize)> {
        let active = self.requests.iter().enumerate().filter(|(_, request)| request.is_active());
        let (generating, prompts): (Vec<_>, Vec<_>) = active.partition(|(_, request)| request.rest() == 1);
        let mut left = most.max(1);
        let mut parts = Vec::new();
        for (at, request) in generating.into_iter().chain(prompts) {
            // A chunk ends at the next checkpoint.
            let to_checkpoint = CHECKPOINT - request.computed() % CHECKPOINT;
            let chunk = request.rest().min(self.options.ring as usize).min(to_checkpoint).min(left);
            if chunk > 0 {
                parts.push((at, chunk));
                left -= chunk;
            }
        }
        // In the order of the requests, like the slices for the model.
        parts.sort_unstable();
        parts
    }

    /// Runs one step of the cache, and handles its results.
    fn step(&mut self) {
        let mut most = self.options.step;
        let parts = loop {
            let parts = self.plan(most);
            if parts.is_empty() {
                return;
            }
            match self.forward(&parts) {
                Ok(()) => break parts,
                Err(Error::OutOfBudget { needed, available }) => {
                    let room = self.put_back(available + 1);
                    if !room && most > 1 {
                        most = (most / 2).min(parts.iter().map(|(_, n)| n / 2).sum()).max(1);
                    } else if !room && self.start_anew(parts[0].0) {
                        most = self.options.step;
                    } else if !room {
                        return self.fail(&parts, &Fault::TooLarge { needed, budget: self.options.budget });
                    }
                }
                Err(error) => return self.fail(&parts, &Fault::Cache(error.to_string())),
            }
        };
        let rows: usize = parts.iter().map(|(_, n)| n).sum();
        self.counts.steps += 1;
        self.counts.rows += rows as u64;
        let (mut row, mut finished) = (0, Vec::new());
        let logits = std::mem::take(&mut self.logits);
        let width = logits.len() / rows;
        for (at, n) in parts {
            row += n;
            let last = &logits[(row - 1) * width..][..self.model.vocab];
            if self.advance(at, last) {
                finished.push(at);
            }
        }
        self.logits = logits;
        finished.into_iter().rev().for_each(|at| drop(self.requests.remove(at)));
    }

    /// Runs the model over the parts of a step.
    fn forward(&mut self, parts: &[(usize, usize)]) -> Result<(), Error> {
        let mut tokens = Vec::new();
        let mut awake: Vec<(Awake<'_>, u32)> = Vec::with_capacity(parts.len());
        let mut wanted = parts.iter().peekable();
        for (at, request) in self.requests.iter_mut().enumerate() {
            let Some((_, n)) = wanted.next_if(|part| part.0 == at) else { continue };
            let from = request.computed();
            tokens.extend_from_slice(&request.tokens[from..from + n]);
            awake.extend(request.active().map(|(sequence, _)| (sequence, *n as u32)));
        }
        let sequences = awake.iter_mut().map(|(sequence, n)| (&mut **sequence, *n)).collect();
        let mut batch = Batch::new(&self.cache, sequences, self.model.heads.2);
        self.model.forward(&mut batch, &tokens, &mut self.logits)
    }

    /// Makes the cache park requests, the newest first, until `bytes` of the first tier are free; if it cannot park any, drops the newest
    /// request's sequence, to be computed again. Spares the oldest. Returns whether room was made.
    fn put_back(&mut self, bytes: u64) -> bool {
        let mut active = self.requests.iter_mut().filter(|request| request.is_active());
        let oldest = active.next();
        // The cache does not park a sequence that is in use.
        let oldest = oldest.and_then(Request::active);
        let Some(last) = active.next_back() else { return false };
        if !self.cache.make_room(bytes).is_ok_and(|made| made.freed > 0) {
            drop(oldest);
            last.sequence = None;
            self.counts.recomputed += 1;
        }
        true
    }

    /// Makes the only active request compute its tokens again without sharing pages with prefixes, since a shared page that is written to
    /// is copied. Returns false if it shares nothing.
    fn start_anew(&mut self, at: usize) -> bool {
        let request = &mut self.requests[at];
        if std::mem::replace(&mut request.apart, true) || self.index.is_none() {
            return false;
        }
        request.begin(self.cache.sequence());
        self.index.iter().for_each(PrefixIndex::clear);
        self.counts.recomputed += 1;
        true
    }

    /// Fails the requests of a step that cannot run.
    fn fail(&mut self, parts: &[(usize, usize)], fault: &Fault) {
        for (at, _) in parts.iter().rev() {
            self.counts.failed += 1;
            let _ = self.requests.remove(*at).job.to.send(Event::Failed(fault.clone()));
        }
    }

    /// Handles the results of a step for one request, given the logits of its last row; returns whether the request is finished.
    fn advance(&mut self, at: usize, logits: &[f32]) -> bool {
        let request = &mut self.requests[at];
        let Some((mut sequence, _)) = request.active() else { return false };
        let len = sequence.next_position().0 as usize;
        let packed = matches!(self.options.store, Store::Packed(_));
        if self.index.is_some() && packed && len.is_multiple_of(CHECKPOINT) {
            // Without a checkpoint, later requests find a shorter prefix.
            let _ = sequence.checkpoint();
        }
        drop(sequence);
        if len < request.tokens.len() {
            return false;
        }
        if len == request.job.prompt.len() {
            self.publish(at, false);
        }
        let request = &mut self.requests[at];
        let token = request.job.sampler.choose(logits);
        let now = Instant::now();
        match request.last.replace(now) {
            None => self.counts.first_token.add(now - request.came),
            Some(last) => self.counts.between_tokens.add(now - last),
        }
        self.counts.generated += 1;
        request.tokens.push(token);
        let ended = Some(token) == self.model.end;
        let mut text = request.text.push(&self.model.bytes(token));
        let reason = match request.generated() == request.job.max_tokens {
            _ if ended || request.text.stopped => Some("stop"),
            true => Some("length"),
            false => None,
        };
        if reason.is_some() {
            text.push_str(&request.text.finish());
        }
        let _ = request.job.to.send(Event::Text(text));
        let Some(reason) = reason else { return false };
        // Before the answer ends: what a client has whole is saved.
        self.publish(at, true);
        let request = &self.requests[at];
        let _ = request.job.to.send(request.done(reason));
        self.counts.finished += 1;
        true
    }

    /// Publishes the request's tokens to the prefix index; if the answer is whole, saves what can be found of them. Other requests wait
    /// meanwhile.
    fn publish(&mut self, at: usize, whole: bool) {
        let Request { job, tokens, sequence, apart: false, .. } = &mut self.requests[at] else { return };
        let sequence = sequence.as_mut().and_then(Parkable::if_awake);
        if let (Some(index), Some(mut sequence)) = (&self.index, sequence) {
            let known = sequence.next_position().0 as usize;
            let published = index.publish(&PrefixScope::new(&job.scope), &tokens[..known], &mut sequence);
            self.counts.unpublished += u64::from(published.is_err());
            if let (Some(kept), Ok(found @ 1..), true) = (&self.kept, published, whole) {
                let cut = sequence.fork_at(found).map_err(Into::into);
                let saved = cut.and_then(|cut| kept.save(&job.scope, &tokens[..found as usize], &cut));
                self.counts.unsaved += u64::from(saved.is_err());
            }
        }
    }
}
