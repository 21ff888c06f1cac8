//! Saves and restores the steps that a rollback can reach, as routers learnt them: words of a saved loop.

use super::{Kept, Layer, Learnt, Left, Met, Part, Ticket, Tickets, most_steps};
use crate::router::{RouterState, StateError};
use pikv_core::page::{PAGE, Position};
use std::sync::Arc;

/// Adds a state, with its length before it.
pub(crate) fn put_state(state: &RouterState, to: &mut Vec<u32>) {
    // Its fields are whole words.
    let bytes = state.to_bytes();
    let words = bytes.as_chunks::<4>().0;
    to.push(words.len() as u32);
    to.extend(words.iter().map(|word| u32::from_le_bytes(*word)));
}

/// Reason why words of a saved loop are invalid.
type Wrong = &'static str;

/// A reader of words.
pub(crate) struct Words<'a>(pub &'a [u32]);

impl<'a> Words<'a> {
    fn slice(&mut self, n: usize) -> Result<&'a [u32], Wrong> {
        let (first, rest) = self.0.split_at_checked(n).ok_or("it ends early")?;
        self.0 = rest;
        Ok(first)
    }

    pub fn word(&mut self) -> Result<u32, Wrong> {
        Ok(self.slice(1)?[0])
    }

    /// A number of at most `most`.
    fn up_to(&mut self, most: u32, wrong: Wrong) -> Result<u32, Wrong> {
        let n = self.word()?;
        if n <= most { Ok(n) } else { Err(wrong) }
    }

    /// A number of items, each of which takes at least `each` of the words that are left.
    fn count(&mut self, each: usize) -> Result<usize, Wrong> {
        let n = self.word()? as usize;
        let fits = n.checked_mul(each).is_some_and(|words| words <= self.0.len());
        if fits { Ok(n) } else { Err("more items than words") }
    }

    /// Reads the data of [`put_state`].
    pub fn state(&mut self) -> Result<RouterState, Wrong> {
        let n = self.count(1)?;
        let bytes: Vec<u8> = self.slice(n)?.iter().flat_map(|word| word.to_le_bytes()).collect();
        RouterState::from_bytes(&bytes).map_err(|_| "a state that no router comes to")
    }
}

impl Learnt {
    /// Adds the kept steps, and the tokens in them of a sequence with these tickets, as if all other sequences were dropped.
    ///
    /// # Errors
    /// The layer of a router with an invalid state, and the reason.
    pub fn save(&self, tickets: &Tickets, to: &mut Vec<u32>) -> Result<(), (usize, StateError)> {
        to.push(self.steps.len() as u32);
        self.steps.iter().try_for_each(|step| step.save(tickets, to))
    }

    /// Reads the data of [`Learnt::save`]: the steps, for a loop with a rollback of `slack` tokens, and the tickets of a sequence of `len`
    /// tokens. `states` are the routers' states.
    ///
    /// # Errors
    /// Data that no loop saves, with the reason.
    pub fn load(
        slack: u32,
        len: u32,
        states: &[RouterState],
        from: &mut Words<'_>,
    ) -> Result<(Learnt, Tickets), Wrong> {
        let (mut learnt, mut tickets) = (Learnt::new(slack), Tickets::default());
        let steps = from.count(1)?;
        if steps > if slack > 0 { most_steps(slack) } else { 0 } {
            return Err("more steps than a loop keeps");
        }
        for _ in 0..steps {
            learnt.steps.push_back(Kept::load(len, states, &mut tickets, from)?);
        }
        Ok((learnt, tickets))
    }
}

impl Kept {
    fn save(&self, tickets: &Tickets, to: &mut Vec<u32>) -> Result<(), (usize, StateError)> {
        to.push(self.parts.len() as u32);
        for part in &self.parts {
            let own = tickets.0.iter().find(|ticket| Arc::ptr_eq(&ticket.left, &part.left));
            let stays = part.left.without(own.map(|ticket| ticket.at));
            to.extend([part.first.0, part.rows, part.firm, part.learnt, stays, u32::from(own.is_some())]);
            to.extend(own.iter().flat_map(|ticket| [ticket.first, ticket.has()]));
        }
        for (l, layer) in self.layers.iter().enumerate() {
            to.push(u32::from(layer.before.is_some()));
            // Without it the rest is of an older step.
            let Some(before) = &layer.before else { continue };
            before.check().map_err(|error| (l, error))?;
            put_state(before, to);
            to.extend(layer.logits.iter().map(|x| x.to_bits()));
            to.extend([layer.remote as u32, (layer.remote >> 32) as u32, layer.met.len() as u32]);
            let met = layer.met.iter();
            to.extend(
                met.flat_map(|(of, met)| [*of as u32, met.row, u32::from(met.expert), met.wanted, met.held]),
            );
        }
        Ok(())
    }

    fn load(
        len: u32,
        states: &[RouterState],
        tickets: &mut Tickets,
        from: &mut Words<'_>,
    ) -> Result<Kept, Wrong> {
        let parts = from.count(6)?;
        if parts == 0 {
            return Err("a step without sequences");
        }
        let mut kept = Kept::default();
        for _ in 0..parts {
            kept.parts.push(Part::load(len, tickets, from)?);
        }
        for state in states {
            kept.layers.push(Layer::load(&kept.parts, state, from)?);
        }
        Ok(kept)
    }
}

impl Part {
    fn load(len: u32, tickets: &mut Tickets, from: &mut Words<'_>) -> Result<Part, Wrong> {
        let first = Position(from.up_to(Position::MAX.0, "a position past the last")?);
        let rows = from.word()?;
        let more = "more tokens than the step had";
        let [firm, learnt, stays] =
            [from.up_to(rows, more)?, from.up_to(rows, more)?, from.up_to(rows, more)?];
        let left = Arc::new(Left::of_gone(stays));
        if from.up_to(1, "a flag that is neither 0 nor 1")? == 1 {
            let (first, has) = (from.word()?, from.up_to(rows, more)?);
            let end = u64::from(first) + u64::from(has);
            let before =
                tickets.0.back().map_or(0, |ticket| u64::from(ticket.first) + u64::from(ticket.has()));
            if has == 0 || end > u64::from(len) || u64::from(first) < before {
                return Err("tokens that the sequence does not have");
            }
            tickets.0.push_back(Ticket::new(first, has, left.clone()));
        }
        Ok(Part { left, first, firm, learnt, rows })
    }
}

impl Layer {
    fn load(parts: &[Part], state: &RouterState, from: &mut Words<'_>) -> Result<Layer, Wrong> {
        let mut layer = Layer::default();
        if from.up_to(1, "a flag that is neither 0 nor 1")? == 0 {
            return Ok(layer);
        }
        let before = from.state()?;
        before.check_as(state).map_err(|_| "the state of another router")?;
        layer.experts = state.experts as usize;
        let rows: u64 = parts.iter().map(|part| u64::from(part.rows - part.firm)).sum();
        let logits = rows.checked_mul(u64::from(state.experts)).and_then(|n| usize::try_from(n).ok());
        let logits = from.slice(logits.ok_or("more items than words")?)?;
        layer.logits.extend(logits.iter().map(|word| f32::from_bits(*word)));
        if layer.logits.iter().any(|x| !x.is_finite()) {
            return Err("a logit that is not finite");
        }
        layer.remote = u64::from(from.word()?) | u64::from(from.word()?) << 32;
        for _ in 0..from.count(5)? {
            let of = from.up_to(parts.len() as u32 - 1, "a sequence that was not in the step")? as usize;
            let row = from.word()?;
            let expert = from.up_to(state.experts - 1, "an expert that is not there")? as u16;
            let wanted = from.up_to(u32::MAX / PAGE, "more pages than can be counted")?;
            let held = from.up_to(wanted * PAGE, "more tokens than their pages have")?;
            if row >= parts[of].rows {
                return Err("a row that was not in the step");
            }
            layer.met.push((of, Met { row, expert, wanted, held }));
        }
        (layer.before, layer.routed) = (Some(before), true);
        Ok(layer)
    }
}
