//! Restores saved sequences.

use super::header::{self, LENGTH, Tensor};
use crate::base::error::{Error, SaveError, SaveOperation};
use crate::base::fields::{Fields, in_tensor, sure};
use crate::base::page_sum;
use crate::cache::Cache;
use crate::cache::inner::Inner;
use crate::cache::sequence::Sequence;
use crate::config::sharing::FEW;
use crate::pages::filing::save::Reach;
use crate::pages::saved::{In, Source};
use pikv_core::page::Position;
use pikv_core::plan::LayerShape;
use std::io::Read;
use std::sync::Arc;

/// Least bytes by which memory grows while reading, so that a length in a file does not allocate memory by itself.
const GROWTH: usize = 1 << 16;

/// Result of [`Cache::restore`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Restored {
    /// The sequence.
    pub sequence: Sequence,
    /// The caller's bytes saved with it.
    pub note: Vec<u8>,
    /// Number of bytes read.
    pub bytes: u64,
}

/// Input with a running checksum.
struct Input<'r> {
    from: &'r mut dyn Read,
    sum: blake3::Hasher,
    at: u64,
}

impl Input<'_> {
    fn exactly(&mut self, to: &mut [u8]) -> Result<(), Error> {
        let failed = |error: std::io::Error| SaveError::Io {
            operation: SaveOperation::Read,
            at: self.at,
            kind: error.kind(),
        };
        self.from.read_exact(to).map_err(failed)?;
        self.at += to.len() as u64;
        Ok(())
    }

    fn bytes(&mut self, to: &mut [u8]) -> Result<(), Error> {
        self.exactly(to)?;
        self.sum.update(to);
        Ok(())
    }
}

impl Source for Input<'_> {
    fn numbers(&mut self, words: &mut [u32]) -> Result<(), Error> {
        self.bytes(bytemuck::cast_slice_mut(words))?;
        words.iter_mut().for_each(|word| *word = u32::from_le(*word));
        Ok(())
    }

    fn page(&mut self, words: &mut [u32]) -> Result<(), Error> {
        self.exactly(bytemuck::cast_slice_mut(words))?;
        words.iter_mut().for_each(|word| *word = u32::from_le(*word));
        self.sum.update(&page_sum::sum(words).to_le_bytes());
        Ok(())
    }
}

/// Reads `n` items in parts, so that memory grows only with data read.
fn gathered<T: Copy + Default>(
    n: u64,
    mut fill: impl FnMut(&mut [T]) -> Result<(), Error>,
) -> Result<Vec<T>, Error> {
    let mut all: Vec<T> = Vec::new();
    while (all.len() as u64) < n {
        let (from, part) = (all.len(), (GROWTH / size_of::<T>()).max(all.len() / 8));
        let part = part.min((n - from as u64).min(part as u64) as usize);
        let refused = |_| Error::OutOfMemory { bytes: ((from + part) * size_of::<T>()) as u64 };
        all.try_reserve_exact(part).map_err(refused)?;
        all.resize(from + part, T::default());
        fill(&mut all[from..])?;
    }
    Ok(all)
}

/// Largest RoPE table, in bytes, that a length in a file may require.
const TABLE: u64 = 1 << 30;

/// The tensors of a file, from the first on.
pub struct Tensors<'t> {
    all: std::iter::Zip<std::slice::Iter<'t, Tensor>, std::slice::Iter<'t, u64>>,
    name: &'t str,
}

impl<'t> Tensors<'t> {
    pub fn new(tensors: &'t [Tensor], elements: &'t [u64]) -> Tensors<'t> {
        Tensors { all: tensors.iter().zip(elements), name: "" }
    }

    /// Number of elements of the next tensor.
    pub fn next(&mut self) -> u64 {
        self.all.next().map_or(0, |(tensor, n)| {
            self.name = &tensor.name;
            *n
        })
    }
}

impl Cache {
    /// Restores a sequence written by [`Sequence::save`], in this cache or another, in this process or another. The configurations must
    /// agree in layers, ring, rollback, sinks, experts, codecs, policies, bounds and hits; back end, lanes, shards, budget and tiers may
    /// differ. Pages that were in a lower tier go to one if there is room, else to the first tier. It reads exactly as many bytes as were
    /// written.
    ///
    /// All input is checked, and its checksum at the end. A length in the file does not allocate memory by itself: memory grows with the
    /// data read, to at most twice its bytes, and by RoPE tables as for any sequence of that length ([`Cache::table_bytes`]). The checksum
    /// detects damage. It is not a signature: anyone who can write the file can write a valid checksum for other tokens.
    ///
    /// # Errors
    /// [`Error::Save`] with the reason: not a saved sequence, a later version, the part of the configuration that differs, an early end, a
    /// wrong checksum or invalid contents; [`SaveError::Fabric`]; [`Error::OutOfBudget`] if the pages do not fit, [`Error::OutOfMemory`];
    /// [`Error::Device`], [`Error::Tier`]. The cache is unchanged then.
    pub fn restore(&self, from: &mut impl Read) -> Result<Restored, Error> {
        Ok(self.restore_with(None, from)?.0)
    }

    /// Restores only the first `len` tokens of a sequence written by [`Sequence::save`], or all if it has no more: the sequence that
    /// [`Sequence::fork_at`] makes of the whole. Later pages are read and checked but take no memory.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let cache = Cache::new(CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 1 << 20).ring(32))?;
    /// let mut sequence = cache.sequence();
    /// let mut step = cache.begin([(&mut sequence, 1000)])?;
    /// step.append(0, &[0.5; 1000 * 4], &[0.25; 1000 * 4])?;
    /// step.commit()?;
    /// let mut bytes = Vec::new();
    /// sequence.save(b"", &mut bytes)?;
    ///
    /// let prefix = cache.restore_prefix(100, &mut &bytes[..])?.sequence;
    /// assert_eq!(prefix.next_position().0, 100);
    /// assert!(prefix.bytes() < sequence.bytes() / 5);
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`Cache::restore`]; [`SaveError::Part`] with a codec, a policy that evicts, counted hits, a window in a layer, or if
    /// tokens of the sequence were evicted: such a sequence can only be restored as a whole.
    pub fn restore_prefix(&self, len: u32, from: &mut impl Read) -> Result<Restored, Error> {
        Ok(self.restore_with(Some(len), from)?.0)
    }

    /// The sequence or its first tokens, and the state of a loop's routers, if it was saved.
    pub(crate) fn restore_with(
        &self,
        until: Option<u32>,
        from: &mut impl Read,
    ) -> Result<(Restored, Option<Vec<u32>>), Error> {
        let inner = &self.inner;
        if inner.fabric.is_some() {
            return Err(SaveError::Fabric.into());
        }
        let mut input = Input { from, sum: blake3::Hasher::new(), at: 0 };
        let (version, tensors, elements) = read_header(inner, &mut input)?;
        let mut tensors = Tensors::new(&tensors, &elements);
        let read = read(inner, (version, until), &mut input, &mut tensors);
        let (sequence, routers, note) = read.map_err(|error| in_tensor(error, tensors.name))?;
        let most = inner.pool.arenas.budget().max(TABLE);
        for layer in 0..inner.shape.config.layers.len() {
            inner.pool.tables.grow_within(layer, sequence.len, most)?;
        }
        Ok((Restored { sequence, note, bytes: input.at }, routers))
    }
}

/// The version, the tensors and the elements of each.
fn read_header(inner: &Inner, input: &mut Input<'_>) -> Result<(u64, Vec<Tensor>, Vec<u64>), Error> {
    let mut length = [0; LENGTH as usize];
    input.bytes(&mut length)?;
    let (length, most) = (u64::from_le_bytes(length), header::most(&inner.shape));
    if length > most {
        let wanted = format!("the length of a header of at most {most} bytes");
        return Err(SaveError::Header { at: 0, wanted }.into());
    }
    let text = gathered(length, |part| input.bytes(part))?;
    header::read(&text, &inner.shape)
}

/// The sequence, the state of the routers, and the caller's bytes.
type Contents = (Sequence, Option<Vec<u32>>, Vec<u8>);

/// Reads everything after the header.
fn read(
    inner: &Arc<Inner>,
    (version, until): (u64, Option<u32>),
    input: &mut Input<'_>,
    tensors: &mut Tensors<'_>,
) -> Result<Contents, Error> {
    let mut sequence = Sequence::new(inner.clone());
    let words = gathered(tensors.next(), |part| input.numbers(part))?;
    let (here, away) = sequence.load_numbers(version, &mut Fields::new(&words))?;
    let needed = if inner.pool.tiers.is_some() { here } else { here.saturating_add(away) };
    let until = until.filter(|until| *until < sequence.len);
    let pages = match until {
        None => inner.reserve(needed, None)?,
        Some(until) => {
            whole_only(inner, &sequence)?;
            // Pages are taken one by one, as needed. Room is made here for the most that are possible; with less, taking a page may fail
            // later.
            let _ = inner.reserve(needed.min(bytes_before(inner, until)), None);
            inner.reserve(0, None)?
        }
    };
    let mut from =
        In { pool: &inner.pool, source: input, pages, left: 0, buffer: Vec::new(), until, behind: 0 };
    sequence.load_layers(&mut from, tensors)?;
    drop(from);
    let has_routers = header::has_routers(version);
    let routers =
        if has_routers { Some(gathered(tensors.next(), |part| input.numbers(part))?) } else { None };
    let note = gathered(tensors.next(), |part| input.bytes(part))?;
    tensors.next();
    let actual = input.sum.finalize();
    let mut found = [0; header::SUM as usize];
    input.exactly(&mut found)?;
    if *actual.as_bytes() != found {
        let found = blake3::Hash::from_bytes(found).to_hex().to_string();
        return Err(SaveError::Sum { found, actual: actual.to_hex().to_string() }.into());
    }
    let sequence = match until {
        Some(until) => sequence.first(until)?,
        None => sequence,
    };
    Ok((sequence, routers, note))
}

/// Checks that the first tokens of a sequence can be restored alone, by its cache and its numbers.
fn whole_only(inner: &Inner, sequence: &Sequence) -> Result<(), Error> {
    let shape = &inner.shape;
    let whys = [
        (shape.rules.iter().any(Option::is_some), "a policy evicts"),
        (
            shape.codecs.iter().flat_map(|heads| heads.iter()).any(Option::is_some),
            "a codec packed its tokens",
        ),
        (inner.pool.hits().is_some(), "hits are counted"),
        (shape.config.layers.iter().any(|layer| layer.window.is_some()), "a layer has a window"),
        (sequence.altered, "tokens were evicted"),
    ];
    match whys.into_iter().find(|(is, _)| *is) {
        Some((_, why)) => Err(SaveError::Part { why }.into()),
        None => Ok(()),
    }
}

/// Upper estimate of the bytes of a sequence of `len` tokens.
fn bytes_before(inner: &Inner, len: u32) -> u64 {
    let layers = inner.shape.config.layers.iter().enumerate();
    let most =
        |(layer, shape): (usize, &LayerShape)| inner.shape.store_at(layer, len).bytes_at_most(shape, len);
    layers.map(most).sum()
}

impl Sequence {
    /// Reads the numbers of the whole sequence; returns the bytes of its pages in the first tier, and in lower ones.
    pub(super) fn load_numbers(&mut self, version: u64, from: &mut Fields<'_>) -> Result<(u64, u64), Error> {
        let ring = self.inner.shape.store.ring;
        let [len, kept, floor] = [from.word()?, from.word()?, from.word()?];
        let reaches = kept >= ring.kept_from(len)
            && (kept == 0 || u64::from(kept) + u64::from(ring.window()) <= u64::from(len));
        sure(len.max(floor) <= Position::MAX.0 && reaches, "a length that no sequence has")?;
        (self.len, self.kept, self.floor) = (len, kept, floor);
        self.altered = from.flag()?;
        for _ in 0..from.count(2)? {
            let pin = from.word()?..from.word()?;
            let apart = self.pins.last().is_none_or(|before| before.end < pin.start);
            sure(!pin.is_empty() && apart, "pins out of order")?;
            self.pins.push(pin);
        }
        for _ in 0..from.count(1)? {
            let end = from.word()?;
            sure(
                end <= len && self.ends.back().is_none_or(|before| *before < end),
                "ends of steps out of order",
            )?;
            self.ends.push_back(end);
        }
        let own = match version {
            header::SHARED.. => from.word()?,
            _ if self.inner.shape.config.experts > FEW => ring.left(len),
            _ => 0,
        };
        sure(own <= Position::MAX.0, "runs of pages at a position that no token has")?;
        self.layers.iter_mut().filter(|_| own > 0).for_each(|layer| layer.own_until = own);
        let tokens = if version >= header::BUDGET { from.word()? } else { 0 };
        if tokens > 0 || version == header::BUDGET {
            sure(self.inner.shape.check_budget(tokens).is_ok(), "a budget that cannot act")?;
            self.budget = Some(tokens);
        }
        let bytes = (from.long()?, from.long()?);
        sure(std::mem::replace(from, Fields::new(&[])).end().is_ok(), "it goes on past its end")?;
        Ok(bytes)
    }

    pub(super) fn load_layers(&mut self, from: &mut In<'_>, tensors: &mut Tensors<'_>) -> Result<(), Error> {
        let inner = self.inner.clone();
        let reach = Reach { len: self.len, kept: self.kept, limit: self.rollback_limit() };
        for (layer, shape) in self.layers.iter_mut().zip(&inner.shape.config.layers) {
            let words = gathered(tensors.next(), |part| from.source.numbers(part))?;
            let mut fields = Fields::new(&words);
            layer.load_tags(&mut fields, &inner.shape, reach)?;
            fields.end()?;
            for h in 0..=layer.heads.len() {
                let words = gathered(tensors.next(), |part| from.source.numbers(part))?;
                let mut fields = Fields::new(&words);
                from.left = tensors.next();
                match h < layer.heads.len() {
                    true => layer.load_head(h, &mut fields, from, (&inner.shape, shape), reach)?,
                    false => layer.load_past(&mut fields, from, &inner.shape, shape)?,
                }
                fields.end()?;
                sure(from.left == 0, "more pages than the numbers tell of")?;
            }
            layer.list_twice()?;
        }
        Ok(())
    }
}
