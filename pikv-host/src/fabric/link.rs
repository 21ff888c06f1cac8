//! Messages to ranks and their answers, with timeouts.

use super::Fabric;
use super::wire::{self, HEADER, Reader, VERSION, kind};
use crate::base::error::FabricError;
use crate::metrics::Traffic;
use std::time::{Duration, Instant};

/// The ranks as seen from the front. Behind a lock: one round at a time.
pub(super) struct Link {
    fabric: Box<dyn Fabric>,
    session: u64,
    call: u64,
    timeout: Duration,
    /// The error by which each rank was lost.
    pub lost: Vec<Option<FabricError>>,
    /// Bytes and pages, as last reported by each rank.
    pub held: Vec<(u64, u64)>,
    pub traffic: Traffic,
    /// Time at which the last round ended.
    pub last: Instant,
    /// Raised when a round failed: what was sent before of pages that are still on the front is sent again.
    pub epoch: u64,
    /// Whether a round with such pages is in progress, failed, or was ended by a panic of the fabric.
    pub unsure: bool,
}

/// The work in a message to a rank, by section.
#[derive(Default)]
pub(super) struct RankWork {
    pub writes: List,
    pub puts: List,
    pub keeps: List,
    pub fetches: List,
    pub asks: List,
    /// Copies whose tokens are in `writes` or `puts`, and up to which lane: forks may share a copy.
    pub synced: Vec<(u64, u32)>,
}

/// Items written one after the other.
#[derive(Default)]
pub(super) struct List {
    pub items: u32,
    pub words: Vec<u32>,
}

impl RankWork {
    pub fn is_empty(&self) -> bool {
        let RankWork { writes, puts, keeps, fetches, asks, .. } = self;
        [writes, puts, keeps, fetches, asks].iter().all(|list| list.items == 0)
    }
}

/// The answer of a rank, without the part that all answers have.
pub(super) struct Answer {
    pub rank: u32,
    pub words: Vec<u32>,
    /// Start of the fetched pages and partial results.
    pub at: usize,
}

impl Link {
    /// Sends a greeting to all ranks and checks their versions and fingerprints.
    pub fn new(
        fabric: Box<dyn Fabric>,
        timeout: Duration,
        session: u64,
        fingerprint: u64,
    ) -> Result<Link, FabricError> {
        let ranks = fabric.ranks() as usize;
        if ranks == 0 {
            return Err(FabricError::Nobody);
        }
        let mut link = Link {
            fabric,
            session,
            call: 0,
            timeout,
            lost: vec![None; ranks],
            held: vec![(0, 0); ranks],
            traffic: Traffic::default(),
            last: Instant::now(),
            epoch: 0,
            unsure: false,
        };
        let hello = |_| {
            let mut message = wire::message(kind::HELLO, session, 0);
            wire::push_u64(&mut message, fingerprint);
            message
        };
        let greetings = (0..ranks as u32).map(|rank| (rank, hello(rank))).collect();
        for (rank, words) in link.round(kind::HELLO, greetings)? {
            let mut reader = Reader::new(&words[HEADER..]);
            reader.status(rank)?;
            let theirs = reader.u64().unwrap_or(0);
            if theirs != fingerprint {
                return Err(FabricError::Configuration { rank, theirs, ours: fingerprint });
            }
        }
        Ok(link)
    }

    /// Ranks that are not lost.
    pub fn alive(&self) -> impl Iterator<Item = u32> {
        self.lost.iter().enumerate().filter(|(_, lost)| lost.is_none()).map(|(rank, _)| rank as u32)
    }

    /// The error of a lost rank.
    pub fn check(&self, rank: u32) -> Result<(), FabricError> {
        match self.lost.get(rank as usize) {
            Some(None) => Ok(()),
            Some(Some(error)) => Err(error.clone()),
            None => Err(FabricError::Malformed { rank, what: "there is no such rank" }),
        }
    }

    /// Sends work to ranks, each of which first frees the pages in `freed`; answers in the order of `work`.
    ///
    /// # Errors
    /// The first error of a rank that is lost or refuses; the other ranks have done their work.
    pub fn work(
        &mut self,
        freed: &mut dyn FnMut(u32) -> Vec<u64>,
        work: Vec<(u32, RankWork)>,
    ) -> Result<Vec<Answer>, FabricError> {
        // Before anything is taken out of the lists for messages.
        for (rank, _) in &work {
            self.check(*rank)?;
        }
        let mut messages = Vec::with_capacity(work.len());
        for (rank, work) in work {
            let mut message = wire::message(kind::WORK, self.session, 0);
            let gone = freed(rank);
            message.push(gone.len() as u32);
            gone.iter().for_each(|id| wire::push_u64(&mut message, *id));
            let RankWork { writes, puts, keeps, fetches, asks, .. } = work;
            for list in [writes, puts, keeps, fetches, asks] {
                message.push(list.items);
                message.extend_from_slice(&list.words);
            }
            messages.push((rank, message));
        }
        let waited = self.traffic.waited;
        let answers = self.round(kind::WORK, messages)?;
        let (mut first, mut longest) = (Ok(()), 0);
        let mut done = Vec::with_capacity(answers.len());
        for (rank, words) in answers {
            let mut reader = Reader::new(&words);
            let read = (|| {
                reader.header();
                reader.status(rank)?;
                let cut = FabricError::Malformed { rank, what: "an answer is cut off" };
                let held = (reader.u64().ok_or(cut.clone())?, reader.u64().ok_or(cut.clone())?);
                longest = longest.max(reader.u64().ok_or(cut)?);
                Ok((held, reader.at()))
            })();
            match read {
                Ok((held, at)) => {
                    self.held[rank as usize] = held;
                    done.push(Answer { rank, words, at });
                }
                Err(error @ FabricError::Device { lost: true, .. }) => self.lose(rank, error, &mut first),
                Err(error) => first = first.and(Err(error)),
            }
        }
        // Bounded by the time waited, whatever the rank reports.
        let waited = self.traffic.waited - waited;
        self.traffic.computed += Duration::from_nanos(longest).min(waited);
        first.map(|()| done)
    }

    /// Sends messages and waits for their answers.
    fn round(
        &mut self,
        kind: u32,
        messages: Vec<(u32, Vec<u32>)>,
    ) -> Result<Vec<(u32, Vec<u32>)>, FabricError> {
        span!(
            "round",
            call = self.call + 1,
            ranks = messages.len(),
            bytes = messages.iter().map(|(_, words)| 4 * words.len()).sum::<usize>(),
        );
        self.call += 1;
        let (begun, call) = (Instant::now(), self.call);
        let ranks: Vec<u32> = messages.iter().map(|(rank, _)| *rank).collect();
        let mut answers: Vec<Option<Vec<u32>>> = ranks.iter().map(|_| None).collect();
        let mut first = Ok(());
        self.traffic.rounds += 1;
        for (rank, mut message) in messages {
            (message[HEADER - 2], message[HEADER - 1]) = (call as u32, (call >> 32) as u32);
            if self.fabric.is_remote(rank) {
                self.traffic.messages += 1;
                self.traffic.sent += 4 * message.len() as u64;
            }
            if let Err(error) = self.fabric.send(rank, message) {
                self.lose(rank, error, &mut first);
            }
        }
        let (mut until, mut idle) = (begun + self.timeout, false);
        while let Some(next) = ranks
            .iter()
            .zip(&answers)
            .position(|(rank, a)| a.is_none() && self.lost[*rank as usize].is_none())
        {
            // An answer to another call does not extend the timeout.
            let over = std::mem::replace(&mut idle, true) && Instant::now() >= until;
            let (rank, words) = match if over { Ok(None) } else { self.fabric.receive(until) } {
                Ok(Some(answer)) => answer,
                Ok(None) => {
                    let waited = self.timeout;
                    for at in next..ranks.len() {
                        if answers[at].is_none() && self.lost[ranks[at] as usize].is_none() {
                            let rank = ranks[at];
                            self.lose(rank, FabricError::Lost { rank, waited }, &mut first);
                        }
                    }
                    break;
                }
                Err(FabricError::Lost { rank, waited }) => {
                    idle = !ranks.iter().zip(&answers).any(|(of, a)| *of == rank && a.is_none())
                        || self.check(rank).is_err();
                    self.lose(rank, FabricError::Lost { rank, waited }, &mut first);
                    continue;
                }
                Err(error) => {
                    for at in next..ranks.len() {
                        if answers[at].is_none() {
                            self.lose(ranks[at], error.clone(), &mut first);
                        }
                    }
                    break;
                }
            };
            let Some(at) = ranks.iter().position(|r| *r == rank) else { continue };
            let Some(sound) = self.judge(kind, rank, &words) else { continue };
            match sound {
                Err(error) => self.lose(rank, error, &mut first),
                Ok(()) => {
                    if self.fabric.is_remote(rank) {
                        self.traffic.received += 4 * words.len() as u64;
                    }
                    answers[at] = Some(words);
                    (until, idle) = (Instant::now() + self.timeout, false);
                }
            }
        }
        self.last = Instant::now();
        self.traffic.waited += self.last - begun;
        first?;
        Ok(ranks.into_iter().zip(answers).filter_map(|(rank, answer)| Some((rank, answer?))).collect())
    }

    /// The error of a rank's answer to the present call; `None` for an answer to an earlier call.
    fn judge(&self, kind: u32, rank: u32, words: &[u32]) -> Option<Result<(), FabricError>> {
        match Reader::new(words).header() {
            Some(header) if header.version != VERSION => {
                Some(Err(FabricError::Version { rank, theirs: header.version, ours: VERSION }))
            }
            Some(header) if (header.session, header.call) != (self.session, self.call) => None,
            Some(header) if header.kind == kind => Some(Ok(())),
            _ => Some(Err(FabricError::Malformed { rank, what: "an answer to something else" })),
        }
    }

    fn lose(&mut self, rank: u32, error: FabricError, first: &mut Result<(), FabricError>) {
        if let Some(lost) = self.lost.get_mut(rank as usize).filter(|lost| lost.is_none()) {
            *lost = Some(error.clone());
            self.held[rank as usize] = (0, 0);
            self.fabric.lost(rank);
        }
        if first.is_ok() {
            *first = Err(error);
        }
    }

    pub fn wants_beat(&self) -> bool {
        self.fabric.wants_beat()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let alive: Vec<u32> = self.alive().collect();
        for rank in alive {
            // A rank that misses it notices by itself.
            let mut bye = wire::message(kind::BYE, self.session, self.call + 1);
            bye.push(u32::from(self.lost.iter().any(Option::is_some)));
            let _ = self.fabric.send(rank, bye);
        }
    }
}
