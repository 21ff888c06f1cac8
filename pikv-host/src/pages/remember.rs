//! Adds keys of tokens that leave the ring to the [`Ghosts`](crate::pages::ghosts::Ghosts) of each head of a layer.

use crate::memory::pool::Pool;
use crate::pages::filing::LayerPages;
use crate::pages::ghosts::Tile;
use pikv_core::LANES;
use pikv_core::page::PAGE;
use pikv_core::plan::LayerShape;

impl LayerPages {
    /// Adds the bounds of keys that no rollback can reach at `len` tokens, if hits are counted. Their tiles are still in the ring. Keys
    /// that cannot be read from a device are left out.
    pub fn remember(&mut self, pool: &Pool, shape: &LayerShape, len: u32) {
        let Some(hits) = pool.hits() else { return };
        let until = pool.shape.known_before(len) / PAGE;
        let done = self.heads.first().map_or(0, |head| head.ghosts.done);
        if done >= until {
            return;
        }
        for tile in done.max(self.first_tile)..until {
            let first = tile * PAGE;
            let home = |lane: usize| {
                let position = first + lane as u32;
                let run = self.run_at(&pool.shape, shape, position)?;
                (run > 0).then(|| self.home(&pool.shape, position))
            };
            let homes: [Option<u16>; LANES] = std::array::from_fn(home);
            if homes.iter().all(Option::is_none) {
                continue;
            }
            let tile_of = Tile { shape, first, homes: &homes, total: &pool.ghosts };
            let at = (tile - self.first_tile) as usize;
            if let Some(device) = pool.shape.config.backend.device() {
                let words = shape.layout.v_base() as usize;
                let places: Vec<(u64, usize)> =
                    self.heads.iter().map(|head| (head.ring[at].address(), words)).collect();
                let heads = &mut self.heads;
                let _ = device.read_all(&places, |read| {
                    let read = read.chunks_exact(words);
                    heads.iter_mut().zip(read).for_each(|(head, words)| head.ghosts.add(&tile_of, words));
                });
                continue;
            }
            for head in &mut self.heads {
                head.ghosts.add(&tile_of, head.ring[at].words());
            }
        }
        let slack = pool.shape.store.ring.slack();
        let floor = pool.shape.known_before(len.saturating_sub(slack));
        let seen = shape.window.map_or(0, |window| len.saturating_sub(window.saturating_add(slack)));
        for head in &mut self.heads {
            head.ghosts.done = until;
            head.ghosts.forget(seen, floor, hits.known as usize);
        }
    }
}
