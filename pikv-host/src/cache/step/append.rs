//! Writes keys and values of a layer into the ring.

use crate::base::error::Error;
use crate::base::error::length;
use crate::base::host_slice::{HostSlice, Scalar};
use crate::cache::inner::Inner;
use crate::cache::step::Step;
use crate::codec::Unpackable;
use crate::memory::arena::{Near, Reservation};
use crate::memory::writes::{Tokens, Write};
use crate::pages::filing::LayerPages;
use crate::policy::Token;
use pikv_core::page::{PAGE, Position, Slot, Unstorable};
use pikv_core::plan::LayerShape;
use pikv_lanes::fetch;

impl Step<'_> {
    /// Writes keys and values of one layer: `k` is `[rows][kv_heads][k_dim]`, `v` `[rows][kv_heads][v_dim]`, each in f32, f16 or bf16
    /// ([`Scalar`]). Older tokens that leave the ring are filed under their experts. O(rows) a head.
    ///
    /// # Errors
    /// [`Error::Layer`]; [`Error::Twice`] for a layer already appended; [`Error::Length`]; [`Error::Unstorable`] or [`Error::RowTooLong`]
    /// for values that the layer's dtype or the head's codec cannot hold ([`Limits`](crate::codec::Limits)); [`Error::OutOfMemory`] for
    /// pages or a RoPE table; [`Error::Device`]. The layer may then be appended again.
    pub fn append(&mut self, layer: usize, k: &[impl Scalar], v: &[impl Scalar]) -> Result<(), Error> {
        self.appendable(layer, k.len(), v.len())?;
        self.append_tokens(layer, &Tokens::Host { k: HostSlice::of(k), v: HostSlice::of(v) })
    }

    /// Checks that a layer can be appended, and the numbers of elements.
    pub(super) fn appendable(&self, layer: usize, k: usize, v: usize) -> Result<(), Error> {
        let shape = self.inner.shape.layer(layer)?;
        if self.layers[layer].appended {
            return Err(Error::Twice { layer, what: "appended" });
        }
        let rows = self.rows * shape.kv_heads as usize;
        length("k", k, rows * shape.layout.k_dim as usize, "rows * kv_heads * k_dim")?;
        length("v", v, rows * shape.layout.v_dim as usize, "rows * kv_heads * v_dim")
    }

    pub(super) fn append_tokens(&mut self, layer: usize, tokens: &Tokens<'_>) -> Result<(), Error> {
        span!("append", layer = layer, rows = self.rows);
        if self.live().next().is_none() {
            self.layers[layer].appended = true;
            return Ok(());
        }
        let inner = self.inner.clone();
        let shape = inner.shape.layer(layer)?;
        // Only if tokens are appended: growing a table costs as much as they do.
        inner.pool.tables.grow(layer, self.live().map(|part| part.len).max().unwrap_or(0))?;
        if inner.shape.config.backend.is_cpu() {
            self.live().for_each(|part| fetch(&part.sequence.layers[layer]));
            self.live().for_each(|part| fetch(&*part.sequence.layers[layer]));
        }
        for part in self.parts.iter_mut().filter(|part| !part.out) {
            let (old, new) = (part.sequence.len, part.len);
            let to = Target { inner: &inner, layer, shape, old, new, first_row: part.row };
            let written = to.write(&mut part.sequence.layers[layer], tokens, &mut self.pages, &mut self.room);
            if written.is_err() {
                self.pages.forget_writes();
                return written;
            }
        }
        let mut filed = false;
        for part in self.parts.iter_mut().filter(|part| !part.out) {
            // Tokens of this step that leave the ring have no experts yet; they are read from the ring.
            let left = inner.shape.store.ring.left(part.len).min(part.sequence.len);
            let state = &mut part.sequence.layers[layer];
            filed |= state.filed < left;
            let done = state.file(&inner.shape, shape, left, &mut self.pages);
            if done.is_err() {
                self.pages.forget_writes();
                return done;
            }
        }
        self.pages.flush_writes(&shape.layout, tokens)?;
        self.pages.flush_copies()?;
        if let Some(front) = inner.fabric.as_ref().filter(|_| filed) {
            front.set_aside(&inner.shape, layer, self.live().map(|part| &*part.sequence.layers[layer]))?;
        }
        for part in self.parts.iter_mut().filter(|part| !part.out) {
            part.sequence.layers[layer].bound(&inner.shape, shape)?;
        }
        self.layers[layer].appended = true;
        Ok(())
    }
}

/// The tokens of a sequence from position `old` to `new` in one layer; the first is row `first_row` of the call.
struct Target<'a> {
    inner: &'a Inner,
    layer: usize,
    shape: &'a LayerShape,
    old: u32,
    new: u32,
    first_row: usize,
}

impl Target<'_> {
    /// Writes the tokens into ring pages.
    fn write(
        &self,
        state: &mut LayerPages,
        tokens: &Tokens<'_>,
        pages: &mut Reservation,
        room: &mut [Vec<f32>; 2],
    ) -> Result<(), Error> {
        let Target { inner, layer, shape, old, new, first_row } = *self;
        let (layout, heads) = (&shape.layout, shape.kv_heads as usize);
        // More tokens share what they miss.
        let fetches = new - old == 1 && inner.shape.config.backend.is_cpu();
        if fetches {
            state.fetch_tables();
        }
        for h in 0..heads {
            if let Some(next) = state.heads.get(h + 1).filter(|_| fetches) {
                let Slot { tile, lane } = Position(old).into();
                let page = next.ring.get((tile - state.first_tile) as usize);
                page.into_iter().for_each(|page| page.fetch_token(layout, lane));
            }
            let head = &mut state.heads[h];
            let codec = state.codecs[h].as_ref();
            let global_head = state.first_head + h as u32;
            let mut position = old;
            while position < new {
                let Slot { tile, lane } = Position(position).into();
                let at = (tile - state.first_tile) as usize;
                if at == head.ring.len() {
                    let shard = inner.shape.shard_of(crate::base::ids::Place::Ring, tile, global_head);
                    let near = Near::next(head.ring.back());
                    head.ring.push_tile(pages.take(shard, layout.words(), near)?);
                }
                let (page, states) = head.ring.tile_mut(at);
                state.undo.note_ring(h, pages.own(layout, page, lane)?);
                for p in position..new.min((tile + 1) * PAGE) {
                    let row = first_row + (p - old) as usize;
                    let token = tokens.row(layout, row * heads + h, room);
                    let write = Write { lane: p % PAGE, position: p, row: row * heads + h, token };
                    let of = |key| if key { ("k", layout.k) } else { ("v", layout.v) };
                    let unstorable = |bad: Unstorable, limit: Option<f32>| {
                        let (Unstorable { key, channel, value }, kv_head) = (bad, h);
                        let (what, dtype) = of(key);
                        let (limit, dtype) = (limit.unwrap_or(dtype.largest()), dtype.name());
                        Error::Unstorable { what, layer, kv_head, row, channel, value, dtype, limit }
                    };
                    pages.write(layout, page, &write).map_err(|bad| unstorable(bad, None))?;
                    if let (Some(codec), Some((key, value))) = (codec, token) {
                        codec.check(key, value).map_err(|bad| match bad {
                            Unpackable { which, length: None, limit } => unstorable(which, Some(limit)),
                            Unpackable { which, length: Some(length), limit } => Error::RowTooLong {
                                what: of(which.key).0,
                                layer,
                                kv_head: h,
                                row,
                                channel: which.channel,
                                value: which.value,
                                length,
                                limit,
                            },
                        })?;
                    }
                    if let Some(rule) = state.rule.as_deref().filter(|rule| rule.words > 0) {
                        // A policy that reads tokens gets those on the device later, once they are on the host.
                        let seen = token.or((!rule.reads_tokens).then_some((&[], &[])));
                        if let Some((key, value)) = seen {
                            let token = Token { layer, kv_head: h, position: Position(p), key, value };
                            rule.born(&token, states, at);
                        }
                    }
                }
                position = new.min((tile + 1) * PAGE);
            }
        }
        Ok(())
    }
}
