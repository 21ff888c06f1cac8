//! Saves and restores the steps that a rollback can reach, as routers learnt them: words of a saved loop.

use super::{KeptLayer, KeptStep, Learnt, SequenceRows, most_steps};
use crate::base::error::Error;
use crate::base::fields::{Fields, content, put_floats, put_long, sure};
use crate::router::met::Met;
use crate::router::tickets::{Tickets, TokensLeft};
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

/// Reads the data of [`put_state`].
///
/// # Errors
/// Words that are no state of a router.
pub(crate) fn read_state(from: &mut Fields<'_>) -> Result<RouterState, Error> {
    let words = from.count(1)?;
    let bytes: Vec<u8> = from.slice(words)?.iter().flat_map(|word| word.to_le_bytes()).collect();
    RouterState::from_bytes(&bytes).map_err(|_| content("a state that no router comes to"))
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
        from: &mut Fields<'_>,
    ) -> Result<(Learnt, Tickets), Error> {
        let (mut learnt, mut tickets) = (Learnt::new(slack), Tickets::default());
        let steps = from.count(1)?;
        sure(steps <= if slack > 0 { most_steps(slack) } else { 0 }, "more steps than a loop keeps")?;
        for _ in 0..steps {
            learnt.steps.push_back(KeptStep::load(len, states, &mut tickets, from)?);
        }
        Ok((learnt, tickets))
    }
}

impl KeptStep {
    fn save(&self, tickets: &Tickets, to: &mut Vec<u32>) -> Result<(), (usize, StateError)> {
        to.push(self.parts.len() as u32);
        for part in &self.parts {
            let (stays, own) = tickets.shared(&part.left);
            to.extend([part.first.0, part.rows, part.firm, part.learnt, stays, u32::from(own.is_some())]);
            to.extend(own.iter().flat_map(|(first, tokens)| [*first, *tokens]));
        }
        for (l, layer) in self.layers.iter().enumerate() {
            to.push(u32::from(layer.before.is_some()));
            // Without it the rest is of an older step.
            let Some(before) = &layer.before else { continue };
            before.check().map_err(|error| (l, error))?;
            put_state(before, to);
            put_floats(to, &layer.logits);
            put_long(to, layer.remote);
            to.push(layer.met.len() as u32);
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
        from: &mut Fields<'_>,
    ) -> Result<KeptStep, Error> {
        let parts = from.count(6)?;
        sure(parts > 0, "a step without sequences")?;
        let mut kept = KeptStep::default();
        for _ in 0..parts {
            kept.parts.push(SequenceRows::load(len, tickets, from)?);
        }
        for state in states {
            kept.layers.push(KeptLayer::load(&kept.parts, state, from)?);
        }
        Ok(kept)
    }
}

impl SequenceRows {
    fn load(len: u32, tickets: &mut Tickets, from: &mut Fields<'_>) -> Result<SequenceRows, Error> {
        let first = Position(from.up_to(Position::MAX.0, "a position past the last")?);
        let rows = from.word()?;
        let more = "more tokens than the step had";
        let [firm, learnt, stays] =
            [from.up_to(rows, more)?, from.up_to(rows, more)?, from.up_to(rows, more)?];
        let left = Arc::new(TokensLeft::of_dropped(stays));
        if from.flag()? {
            let (first, tokens) = (from.word()?, from.up_to(rows, more)?);
            sure(tickets.restore(first, tokens, len, &left), "tokens that the sequence does not have")?;
        }
        Ok(SequenceRows { left, first, firm, learnt, rows })
    }
}

impl KeptLayer {
    fn load(parts: &[SequenceRows], state: &RouterState, from: &mut Fields<'_>) -> Result<KeptLayer, Error> {
        let mut layer = KeptLayer::default();
        if !from.flag()? {
            return Ok(layer);
        }
        let before = read_state(from)?;
        before.check_as(state).map_err(|_| content("the state of another router"))?;
        layer.experts = state.experts as usize;
        let rows: u64 = parts.iter().map(|part| u64::from(part.rows - part.firm)).sum();
        let logits = rows.checked_mul(u64::from(state.experts)).and_then(|n| usize::try_from(n).ok());
        let logits = from.slice(logits.ok_or_else(|| content("more items than words"))?)?;
        layer.logits.extend(logits.iter().map(|word| f32::from_bits(*word)));
        sure(layer.logits.iter().all(|x| x.is_finite()), "a logit that is not finite")?;
        layer.remote = from.long()?;
        for _ in 0..from.count(5)? {
            let of = from.up_to(parts.len() as u32 - 1, "a sequence that was not in the step")? as usize;
            let row = from.word()?;
            let expert = from.up_to(state.experts - 1, "an expert that is not there")? as u16;
            let wanted = from.up_to(u32::MAX / PAGE, "more pages than can be counted")?;
            let held = from.up_to(wanted * PAGE, "more tokens than their pages have")?;
            sure(row < parts[of].rows, "a row that was not in the step")?;
            layer.met.push((of, Met { row, expert, wanted, held }));
        }
        (layer.before, layer.routed) = (Some(before), true);
        Ok(layer)
    }
}
