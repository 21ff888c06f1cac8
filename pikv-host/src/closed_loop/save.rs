//! Saves and restores a sequence of a loop with the state of the routers.

use super::learnt::Learnt;
use super::learnt::save::{put_state, read_state};
use super::{ClosedLoop, LoopError};
use crate::base::error::{Error, SaveError};
use crate::base::fields::{Fields, in_tensor, sure};
use crate::cache::save::Restored;
use crate::cache::save::file::{read_file, write_file};
use crate::cache::sequence::Sequence;
use crate::router::tickets::Tickets;
use crate::router::{RouterState, Routes};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

impl ClosedLoop {
    /// Writes a sequence of the loop as [`Sequence::save`] does, with the state of the routers: averages, counts, bandits with their random
    /// numbers, and the data to forget tokens within reach of a rollback. [`ClosedLoop::restore`] continues with the same bits in every
    /// step, routing, eviction and rollback, as a loop in which all other sequences were dropped. Options of routers are not saved, as in a
    /// [`RouterState`]: build the restoring loop with routers of the same options.
    ///
    /// The file is a saved sequence with an additional tensor for the routers; [`Cache::restore`](crate::Cache::restore) reads the sequence
    /// alone. Of several sequences of a loop, save one here and the others by [`Sequence::save`]. Besides the pages the file has 4 bytes
    /// for each number in the state of the routers, twice for each of the [kept steps](ClosedLoop::kept_steps), with their logits.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::router::{CacheAware, Shape};
    /// use pikv::{Cache, CacheConfig, ClosedLoop, Dtype, LayerShape};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 1 << 20).experts(4, 2);
    /// let looped = || -> Result<ClosedLoop, Box<dyn std::error::Error>> {
    ///     let router = CacheAware::default().router(Shape::new(4, 2))?;
    ///     Ok(ClosedLoop::new(Cache::new(config.clone())?, vec![Box::new(router)])?)
    /// };
    /// let mut first = looped()?;
    /// let mut sequence = first.cache().sequence();
    /// let mut step = first.begin([(&mut sequence, 1)])?;
    /// step.append(0, &[0.5; 4], &[0.25; 4])?;
    /// step.route(0, &[0.1, 0.9, 0.3, -1.0])?;
    /// step.commit()?;
    ///
    /// let mut bytes = Vec::new();
    /// first.save(&sequence, b"model 7", &mut bytes)?;
    /// let mut second = looped()?;
    /// let restored = second.restore(&mut &bytes[..])?;
    /// assert_eq!(restored.sequence.next_position().0, 1);
    /// assert_eq!(second.routers()[0].state(), first.routers()[0].state());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Sequence::save`]; [`Error::ForeignSequence`]; [`LoopError::Route`] for a custom router that cannot be saved
    /// ([`Router::saves`](crate::router::Router::saves)) or returns an invalid state, or for a router that fails to forget rolled back
    /// tokens.
    pub fn save(&mut self, sequence: &Sequence, note: &[u8], to: &mut impl Write) -> Result<u64, LoopError> {
        if !Arc::ptr_eq(&sequence.inner, &self.cache.inner) {
            return Err(LoopError::Cache(Error::ForeignSequence { index: 0 }));
        }
        self.forget_undone()?;
        let mut words = vec![self.routers.len() as u32];
        for (layer, router) in self.routers.iter().enumerate() {
            let refused = |source| LoopError::Route { layer, source };
            router.saves().map_err(refused)?;
            let state = router.state();
            state.check().map_err(|error| refused(error.into()))?;
            put_state(&state, &mut words);
        }
        let kept = self.learnt.save(&sequence.tickets, &mut words);
        kept.map_err(|(layer, error)| LoopError::Route { layer, source: error.into() })?;
        Ok(sequence.save_with(Some(words), note, to)?)
    }

    /// [`ClosedLoop::save`] to a file, as [`Sequence::save_file`].
    ///
    /// # Errors
    /// The errors of [`ClosedLoop::save`] and [`Sequence::save_file`].
    pub fn save_file(
        &mut self,
        sequence: &Sequence,
        note: &[u8],
        path: impl AsRef<Path>,
    ) -> Result<u64, LoopError> {
        write_file(path.as_ref(), |to| self.save(sequence, note, to))
    }

    /// Restores a sequence written by [`ClosedLoop::save`], and sets the routers to the saved state; their present state is lost. They must
    /// have the same kinds, experts and options. Input is checked as by [`Cache::restore`](crate::Cache::restore), the state of routers
    /// after the checksum.
    ///
    /// # Errors
    /// The errors of [`Cache::restore`](crate::Cache::restore); [`SaveError::NoRouters`] for a sequence saved without routers;
    /// [`LoopError::Route`] for a router that refuses the state, because its kind or shape differs. Cache and routers are unchanged then.
    ///
    /// # Panics
    /// If a router panics; routers of earlier layers have taken their states then.
    pub fn restore(&mut self, from: &mut impl Read) -> Result<Restored, LoopError> {
        let (mut restored, words) = self.cache.restore_with(None, from)?;
        let words = words.ok_or(Error::Save(SaveError::NoRouters))?;
        let read = self.read_routers(&words, restored.sequence.len);
        let (states, learnt, tickets) = read.map_err(|error| in_tensor(error, "routers"))?;
        self.forget_undone()?;
        let before: Vec<_> = self.routers.iter().map(|router| router.state()).collect();
        for layer in 0..states.len() {
            if let Err(source) = self.routers[layer].restore(&states[layer]) {
                for (router, state) in self.routers.iter_mut().zip(&before[..layer]) {
                    router.restore(state).map_err(|source| LoopError::Route { layer, source })?;
                }
                return Err(LoopError::Route { layer, source });
            }
        }
        self.learnt = learnt;
        restored.sequence.tickets = tickets;
        self.routes.iter_mut().for_each(Routes::clear);
        Ok(restored)
    }

    /// Reads what [`ClosedLoop::save`] writes of the routers for a sequence of `len` tokens: their states, the kept steps, and the sequence's
    /// tickets of these.
    ///
    /// # Errors
    /// Words that no loop saves.
    fn read_routers(&self, words: &[u32], len: u32) -> Result<(Vec<RouterState>, Learnt, Tickets), Error> {
        let mut from = Fields::new(words);
        sure(from.word()? as usize == self.routers.len(), "not a router for each layer")?;
        let states = self.routers.iter().map(|_| read_state(&mut from)).collect::<Result<Vec<_>, _>>()?;
        let slack = self.cache.inner.shape.store.ring.slack();
        let (learnt, tickets) = Learnt::load(slack, len, &states, &mut from)?;
        from.end()?;
        Ok((states, learnt, tickets))
    }

    /// [`ClosedLoop::restore`] from a file, as [`Cache::restore_file`](crate::Cache::restore_file).
    ///
    /// # Errors
    /// The errors of [`ClosedLoop::restore`] and [`Cache::restore_file`](crate::Cache::restore_file).
    pub fn restore_file(&mut self, path: impl AsRef<Path>) -> Result<Restored, LoopError> {
        read_file(path.as_ref(), |from| self.restore(from))
    }
}
