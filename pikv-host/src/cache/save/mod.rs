//! Saves sequences as bytes, and restores them.

pub(crate) mod file;
mod fingerprint;
mod header;
mod park;
mod restore;

pub use park::Parked;
pub use restore::Restored;

use crate::base::error::{Error, SaveError, SaveOperation};
use crate::base::fields::put_long;
use crate::base::page_sum;
use crate::cache::sequence::Sequence;
use crate::config::shape::CacheShape;
use crate::pages::filing::save::Reach;
use crate::pages::saved::{Out, Words};
use std::borrow::Cow;
use std::io::Write;

/// Output with a running checksum.
struct Sink<'w, W> {
    to: &'w mut W,
    sum: blake3::Hasher,
    at: u64,
}

impl<W: Write> Sink<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let failed = |error: std::io::Error| SaveError::Io {
            operation: SaveOperation::Write,
            at: self.at,
            kind: error.kind(),
        };
        self.to.write_all(bytes).map_err(failed)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.sum.update(bytes);
        self.write(bytes)
    }

    fn numbers(&mut self, words: &[u32]) -> Result<(), Error> {
        self.put(bytemuck::cast_slice(&little(words)))
    }

    /// Adds a page to the checksum by a hash of the page, which is much faster and detects any changed word.
    fn page(&mut self, words: &[u32]) -> Result<(), Error> {
        self.sum.update(&page_sum::sum(words).to_le_bytes());
        self.write(bytemuck::cast_slice(&little(words)))
    }
}

/// Words in little-endian order.
fn little(words: &[u32]) -> Cow<'_, [u32]> {
    match cfg!(target_endian = "little") {
        true => Cow::Borrowed(words),
        false => words.iter().map(|word| word.to_le()).collect(),
    }
}

/// Writes a sequence, given as parts, in a version of the format that can hold it.
fn write_parts(
    version: u64,
    shape: &CacheShape,
    parts: &[Out<'_>],
    note: &[u8],
    to: &mut impl Write,
) -> Result<u64, Error> {
    let tensors = header::tensors(version, shape);
    let mut elements = Vec::with_capacity(tensors.len());
    // The first part, and the parts of a layer's tokens, have no pages.
    for (tensor, part) in tensors.iter().zip(parts) {
        let pages = part.pages.iter().map(|page| page.len()).sum();
        elements.push(if tensor.name.ends_with(".pages") { pages } else { part.fields.len() as u64 });
    }
    elements.extend([note.len() as u64, header::SUM]);
    let mut sink = Sink { to, sum: blake3::Hasher::new(), at: 0 };
    sink.put(&header::write(version, shape, &tensors, &elements))?;
    for part in parts {
        sink.numbers(&part.fields)?;
        part.pages.iter().try_for_each(|page| page.give(|words| sink.page(words)))?;
    }
    sink.put(note)?;
    let sum = sink.sum.finalize();
    sink.put(sum.as_bytes())?;
    let (at, failed) = (sink.at, |kind| SaveError::Io { operation: SaveOperation::Write, at: sink.at, kind });
    to.flush().map_err(|error| failed(error.kind()))?;
    Ok(at)
}

impl Sequence {
    /// Writes the sequence to `to`, with `note`, bytes of the caller's (such as the model's revision and the tokens); returns the number of
    /// bytes. [`Cache::restore`](crate::Cache::restore) makes a sequence from them with the same bits in every later step, eviction and
    /// rollback, and the same reach of rollbacks. Forks that share pages with it are not saved.
    ///
    /// The bytes are a safetensors file: pages by layer and head in their stored form, packed or not; the format's version, hashes of the
    /// configuration, and a BLAKE3 checksum of everything, with each page by a hash of 64 bits. They are not encrypted: anyone who reads
    /// them can recover much of the prompt. Pages are written one by one; besides them the call takes memory for the policies' state of
    /// tokens, and 24 bytes a page. O(bytes).
    ///
    /// Not saved: [checkpoints](Sequence::checkpoint); pages of [`Sequence::seal`]; and the state of routers, so a rollback of the restored
    /// sequence does not change what they have learnt ([`ClosedLoop::save`](crate::ClosedLoop::save) saves it).
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let config = CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 1 << 20);
    /// let cache = Cache::new(config.clone())?;
    /// let mut sequence = cache.sequence();
    /// let mut step = cache.begin([(&mut sequence, 100)])?;
    /// step.append(0, &[0.5; 100 * 4], &[0.25; 100 * 4])?;
    /// step.commit()?;
    ///
    /// let mut bytes = Vec::new();
    /// sequence.save(b"model 7", &mut bytes)?;
    /// let restored = Cache::new(config)?.restore(&mut &bytes[..])?;
    /// assert_eq!(restored.sequence.next_position().0, 100);
    /// assert_eq!(restored.note, b"model 7");
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`SaveError::Io`] for an error of `to`, [`SaveError::Fabric`]; [`Error::Poisoned`]; [`Error::Device`], [`Error::Tier`]. Bytes
    /// already written are then no saved sequence.
    pub fn save(&self, note: &[u8], to: &mut impl Write) -> Result<u64, Error> {
        self.save_with(None, note, to)
    }

    /// [`Sequence::save`], with the state of a loop's routers.
    pub(crate) fn save_with(
        &self,
        routers: Option<Vec<u32>>,
        note: &[u8],
        to: &mut impl Write,
    ) -> Result<u64, Error> {
        self.sound()?;
        if self.inner.fabric.is_some() {
            return Err(SaveError::Fabric.into());
        }
        // Writes of a leaked step are not saved.
        let repaired = self.stepping.then(|| self.repaired());
        let version = header::version(&self.inner.shape, self.budget, routers.is_some());
        let mut parts = repaired.as_ref().unwrap_or(self).parts(version);
        parts.extend(routers.map(|fields| Out { fields, pages: Vec::new() }));
        write_parts(version, &self.inner.shape, &parts, note, to)
    }

    /// Parts of the saved sequence, one for each tensor except the last two.
    fn parts(&self, version: u64) -> Vec<Out<'_>> {
        let Sequence { inner, layers, len, kept, .. } = self;
        let reach = Reach { len: *len, kept: *kept, limit: self.rollback_limit() };
        let mut parts = vec![Out::default()];
        for (layer, shape) in layers.iter().zip(&inner.shape.config.layers) {
            let mut tags = Out::default();
            layer.save_tags(&mut tags.fields);
            parts.push(tags);
            for head in &layer.heads {
                let mut part = Out::default();
                head.save(&shape.layout, layer.first_tile, reach, &mut part);
                parts.extend(part.apart());
            }
            let mut past = Out::default();
            layer.save_past(&shape.layout, &mut past);
            parts.extend(past.apart());
        }
        parts[0].fields = self.numbers(version, &parts);
        parts
    }

    /// Numbers of the whole sequence.
    fn numbers(&self, version: u64, parts: &[Out<'_>]) -> Vec<u32> {
        let Sequence { len, kept, floor, altered, pins, ends, budget, .. } = self;
        let mut to = vec![*len, *kept, *floor, u32::from(*altered), pins.len() as u32];
        to.extend(pins.iter().flat_map(|pin| [pin.start, pin.end]));
        to.push(ends.len() as u32);
        to.extend(ends);
        if version >= header::SHARED {
            to.push(self.layers.first().map_or(0, |layer| layer.own_until));
        }
        // In older versions the number of the version shows whether a budget follows.
        if version >= header::ROUTERS {
            to.push(budget.unwrap_or(0));
        } else {
            to.extend(budget);
        }
        // Counted by saved pages: a page that is in two places of a sequence is saved twice.
        let pages = || parts.iter().flat_map(|part| &part.pages);
        let away: u64 =
            pages().filter(|page| matches!(page, Words::Away(_))).map(|page| 4 * page.len()).sum();
        put_long(&mut to, pages().map(|page| 4 * page.len()).sum::<u64>() - away);
        put_long(&mut to, away);
        to
    }
}
