//! Tokens of a step that its sequences still have after rollbacks. A sequence holds a ticket for each step of a loop; the loop reads from the
//! tickets how many tokens its routers must unlearn.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tokens of a step that are left: of a sequence and its forks, which have them in common, the largest number that one of them still has. A
/// dropped sequence keeps the number that it had.
#[derive(Debug, Default)]
pub(crate) struct TokensLeft(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// The number for dropped sequences, and for steps that no rollback reaches.
    stays: u32,
    /// The numbers for the other sequences; `None` is a free entry.
    of: Vec<Option<u32>>,
}

impl TokensLeft {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens of dropped sequences only.
    pub fn of_dropped(stays: u32) -> TokensLeft {
        TokensLeft(Mutex::new(Counts { stays, of: Vec::new() }))
    }

    /// Tokens that are left to all but the sequence whose entry is `own`.
    fn without(&self, own: Option<usize>) -> u32 {
        let counts = self.counts();
        let others = counts.of.iter().enumerate().filter(|(at, _)| Some(*at) != own);
        others.filter_map(|(_, count)| *count).fold(counts.stays, u32::max)
    }

    /// Tokens that are left.
    pub fn get(&self) -> u32 {
        let counts = self.counts();
        counts.of.iter().flatten().copied().fold(counts.stays, u32::max)
    }
}

/// Tokens that a sequence added in a step of a loop.
#[derive(Debug)]
struct Ticket {
    /// Position of the first.
    first: u32,
    left: Arc<TokensLeft>,
    /// Index of the sequence's entry in the counts.
    at: usize,
}

impl Ticket {
    fn new(first: u32, tokens: u32, left: Arc<TokensLeft>) -> Ticket {
        let mut counts = left.counts();
        let at = counts.of.iter().position(Option::is_none).unwrap_or(counts.of.len());
        match counts.of.get_mut(at) {
            Some(free) => *free = Some(tokens),
            None => counts.of.push(Some(tokens)),
        }
        drop(counts);
        Ticket { first, left, at }
    }

    /// Number of these tokens that the sequence still has.
    fn has(&self) -> u32 {
        self.left.counts().of[self.at].unwrap_or(0)
    }
}

impl Clone for Ticket {
    fn clone(&self) -> Ticket {
        Ticket::new(self.first, self.has(), self.left.clone())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut counts = self.left.counts();
        let has = counts.of[self.at].take().unwrap_or(0);
        counts.stays = counts.stays.max(has);
    }
}

/// A sequence's tickets of the steps that a rollback can reach.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tickets(VecDeque<Ticket>);

impl Tickets {
    /// Adds the tokens from `first` to `len`, and removes tickets before `floor`.
    pub fn add(&mut self, first: u32, len: u32, floor: u32) -> Arc<TokensLeft> {
        while self.0.get(1).is_some_and(|next| next.first <= floor) {
            self.0.pop_front();
        }
        let left = Arc::<TokensLeft>::default();
        self.0.push_back(Ticket::new(first, len - first, left.clone()));
        left
    }

    /// Notes a rollback to `len` tokens.
    pub fn cut(&mut self, len: u32) {
        while let Some(ticket) = self.0.back() {
            let stay = len.saturating_sub(ticket.first);
            if stay >= ticket.has() {
                return;
            }
            ticket.left.counts().of[ticket.at] = Some(stay);
            if stay > 0 {
                return;
            }
            self.0.pop_back();
        }
    }

    /// Of a step's tokens: how many are left to other sequences, and which this one has, as first position and number; `None` if it was not
    /// in the step.
    pub fn shared(&self, step: &Arc<TokensLeft>) -> (u32, Option<(u32, u32)>) {
        let own = self.0.iter().find(|ticket| Arc::ptr_eq(&ticket.left, step));
        (step.without(own.map(|ticket| ticket.at)), own.map(|ticket| (ticket.first, ticket.has())))
    }

    /// Adds a saved ticket of a sequence of `len` tokens: it has `tokens` from `first` on of the step. False, and no ticket, for tokens that
    /// the sequence does not have or that come before those of the last ticket.
    pub fn restore(&mut self, first: u32, tokens: u32, len: u32, step: &Arc<TokensLeft>) -> bool {
        let end = |first: u32, tokens: u32| u64::from(first) + u64::from(tokens);
        let before = self.0.back().map_or(0, |ticket| end(ticket.first, ticket.has()));
        let holds = tokens > 0 && end(first, tokens) <= u64::from(len) && u64::from(first) >= before;
        if holds {
            self.0.push_back(Ticket::new(first, tokens, step.clone()));
        }
        holds
    }

    /// Bytes of the list.
    pub fn bytes(&self) -> u64 {
        (self.0.capacity() * size_of::<Ticket>()) as u64
    }
}
