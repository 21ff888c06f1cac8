//! Sequences that outlive their process: written to bytes, and made again from them.

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

/// Where a sequence is written, with the sum of what was.
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

    /// A page goes into the sum by one of its own, which takes a fraction of the time and shows any word that changed.
    fn page(&mut self, words: &[u32]) -> Result<(), Error> {
        self.sum.update(&page_sum::sum(words).to_le_bytes());
        self.write(bytemuck::cast_slice(&little(words)))
    }
}

/// Words with their lowest bytes first.
fn little(words: &[u32]) -> Cow<'_, [u32]> {
    match cfg!(target_endian = "little") {
        true => Cow::Borrowed(words),
        false => words.iter().map(|word| word.to_le()).collect(),
    }
}

/// Writes a sequence of which there are these parts, in a version of the format that holds them.
fn write_parts(
    version: u64,
    shape: &CacheShape,
    parts: &[Out<'_>],
    note: &[u8],
    to: &mut impl Write,
) -> Result<u64, Error> {
    let tensors = header::tensors(version, shape);
    let mut elements = Vec::with_capacity(tensors.len());
    // The first part has no pages, nor has what a layer says of its tokens.
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
    /// Writes the sequence to `to`, with `note`, bytes of the caller's (the model's revision and the tokens, say); returns the number of
    /// bytes. [`Cache::restore`](crate::Cache::restore) makes a sequence of them that goes on as this one: the same bits from every
    /// step, eviction and rollback to come, as far back as this one can be taken. Forks that it shares pages with are not saved with it.
    ///
    /// The bytes are a safetensors file: pages by layer and head as they are stored, packed ones packed; the format's version, sums of
    /// what the configuration says, and a BLAKE3 sum of all of it, of pages by a sum of 64 bits each. They are not encrypted: who reads
    /// them reads what the prompt left. Pages go out one by one; beside them the call takes memory for what policies keep of tokens,
    /// and 24 bytes a page. O(bytes).
    ///
    /// Not in it: [checkpoints](Sequence::checkpoint); what was filed ahead for forks ([`Sequence::seal`]); and what routers learnt of the
    /// tokens, so that a rollback of the restored sequence does not reach that: [`ClosedLoop::save`](crate::ClosedLoop::save) has it.
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
    /// [`SaveError::Io`] where `to` refuses, [`SaveError::Fabric`]; [`Error::Poisoned`]; a device or a lower tier that fails. What was
    /// written until then is no saved sequence.
    pub fn save(&self, note: &[u8], to: &mut impl Write) -> Result<u64, Error> {
        self.save_with(None, note, to)
    }

    /// The same, with what the routers of a loop have learnt.
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
        // What a leaked step wrote is not saved.
        let repaired = self.stepping.then(|| self.repaired());
        let version = header::version(self.budget, routers.is_some());
        let mut parts = repaired.as_ref().unwrap_or(self).parts(version);
        parts.extend(routers.map(|fields| Out { fields, pages: Vec::new() }));
        write_parts(version, &self.inner.shape, &parts, note, to)
    }

    /// What is saved, one part for each tensor but the last two.
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

    /// What is said of the whole sequence.
    fn numbers(&self, version: u64, parts: &[Out<'_>]) -> Vec<u32> {
        let Sequence { len, kept, floor, altered, pins, ends, budget, .. } = self;
        let mut to = vec![*len, *kept, *floor, u32::from(*altered), pins.len() as u32];
        to.extend(pins.iter().flat_map(|pin| [pin.start, pin.end]));
        to.push(ends.len() as u32);
        to.extend(ends);
        // In older versions the version says whether there is one.
        if version >= header::ROUTERS {
            to.push(budget.unwrap_or(0));
        } else {
            to.extend(budget);
        }
        // By the pages that are saved: of those that two places of a sequence share there are two.
        let pages = || parts.iter().flat_map(|part| &part.pages);
        let away: u64 =
            pages().filter(|page| matches!(page, Words::Away(_))).map(|page| 4 * page.len()).sum();
        put_long(&mut to, pages().map(|page| 4 * page.len()).sum::<u64>() - away);
        put_long(&mut to, away);
        to
    }
}
