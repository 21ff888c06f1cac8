//! The store of a rank: pages by their numbers, and the answers to messages.

use super::ask::{Ask, Listed};
use crate::base::error::CudaError;
use crate::base::error::Error;
use crate::base::parallel::threads;
use crate::config::CacheConfig;
use crate::config::shape::CacheShape;
use crate::device::Device;
use crate::fabric::wire::{self, HEADER, Header, Reader, Refusal, VERSION, kind};
use crate::memory::arena::{Near, Page};
use crate::memory::pool::Pool;
use crate::tiers::Tiers;
use pikv_core::attend::BLOCK;
use pikv_core::page::{Layout, PAGE, Position};
use pikv_core::shard::ShardMap;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

/// The pages of one rank, in an arena and under a budget of its own, and the routines that read them: on the back end of its
/// configuration, which need not be that of the other ranks.
///
/// A [`Fabric`](super::Fabric) brings it messages, and takes its answers back. It knows nothing of sequences: a page has a
/// number that is used once in a session, and what is asked for and is not there is an error, never another page.
#[derive(Debug)]
pub struct Store {
    pool: Pool,
    pages: HashMap<u64, Page>,
    /// Pages that could not be taken when tokens came for them, and why.
    refused: HashMap<u64, Refusal>,
    session: u64,
    fingerprint: u64,
    /// Whether several threads work out the questions of a message.
    parallel: bool,
}

/// Writes to pages that a message brings: in the host's memory they are done at once, on a device all together.
#[derive(Default)]
struct Came<'m> {
    /// Tokens: their layer, the page's address, the lane, and the words.
    tokens: Vec<(usize, u64, u32, &'m [u32])>,
    /// Pages: their address, and the words.
    pages: Vec<(u64, &'m [u32])>,
}

/// A hash of what two ranks must have in common.
pub(super) fn fingerprint(shape: &CacheShape) -> u64 {
    let CacheShape { config, frequencies, .. } = shape;
    let codecs: Vec<_> = config.codecs.iter().map(|rule| (rule.layer, rule.kv_head, &rule.codec)).collect();
    let text = format!("{VERSION} {:?} {frequencies:?} {codecs:?} {}", config.layers, config.lanes.rows());
    // FNV-1a: it tells mistakes apart, not attacks.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl Store {
    /// A store for the pages of a cache of this configuration, of which it has `budget` bytes at most, in the memory of the
    /// configuration's back end. No memory is taken before there are pages. Where keys are stored before their rotation, its table
    /// takes as much again at most, or 64 MiB if that is more; what would need a larger one is [`FabricError::Memory`].
    ///
    /// [`FabricError::Memory`]: crate::base::error::FabricError::Memory
    ///
    /// # Errors
    /// An invalid configuration.
    pub fn new(config: &CacheConfig, budget: u64) -> Result<Store, Error> {
        let config = CacheConfig { budget, tiers: Tiers::new(), ..config.clone() }.shards(ShardMap::ONE);
        let pool = Pool::new(&Arc::new(CacheShape::new(config, false)?))?;
        let fingerprint = fingerprint(&pool.shape);
        let (pages, refused) = (HashMap::new(), HashMap::new());
        Ok(Store { pool, pages, refused, session: 0, fingerprint, parallel: false })
    }

    /// Whether several threads work out the questions of a message. They are started for that message, and there are as many at
    /// most as the rayon pool has that [`Store::answer`] is called in (1 without the feature `rayon`). The pool's own threads are
    /// not used: one that waited for a share of the work would take other work of the pool meanwhile, which may wait for this
    /// very answer.
    pub fn parallel(mut self, on: bool) -> Store {
        self.parallel = on;
        self
    }

    /// Bytes of pages held.
    pub fn bytes(&self) -> u64 {
        self.pool.arenas.taken()
    }

    /// Whether a message asks the rank to end.
    pub fn is_last(message: &[u32]) -> bool {
        Reader::new(message).header().is_some_and(|header| header.kind == kind::BYE)
    }

    /// Whether a message that [asks the rank to end](Store::is_last) says that another rank was lost: a transport that ends by waiting
    /// for all ranks would then wait for ever.
    pub fn lost(message: &[u32]) -> bool {
        Store::is_last(message) && message.get(HEADER).is_some_and(|lost| *lost != 0)
    }

    /// Checks that the pages are those that the arena counts.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        let held: u64 = self.pages.values().map(Page::bytes).sum();
        let counted: u64 = self.pool.arenas.bytes_by_shard().sum();
        match (held == counted && counted == self.bytes(), self.pages.values().any(Page::is_shared)) {
            (true, false) => Ok(()),
            (false, _) => Err(format!("{held} bytes of pages, {counted} counted, {} taken", self.bytes())),
            (_, true) => Err("a page has two owners".to_owned()),
        }
    }

    /// Does what a message asks for, and gives the answer; `None` to what wants none.
    pub fn answer(&mut self, message: &[u32]) -> Option<Vec<u32>> {
        let mut reader = Reader::new(message);
        let header = reader.header()?;
        let Header { version, kind, session, call } = header;
        if kind == kind::BYE {
            return None;
        }
        let mut out = wire::message(kind, session, call);
        let result =
            if version != VERSION { Err(Refusal::Version) } else { self.act(header, &mut reader, &mut out) };
        if let Err(refusal) = result {
            out.truncate(HEADER);
            refusal.write(&mut out);
        }
        Some(out)
    }

    fn act(&mut self, header: Header, reader: &mut Reader<'_>, out: &mut Vec<u32>) -> Result<(), Refusal> {
        match header.kind {
            kind::HELLO => {
                self.pages.clear();
                self.refused.clear();
                self.session = header.session;
                wire::done(out);
                wire::push_u64(out, self.fingerprint);
                Ok(())
            }
            kind::WORK if header.session == self.session => self.work(reader, out),
            _ => Err(Refusal::Malformed),
        }
    }

    fn work(&mut self, reader: &mut Reader<'_>, out: &mut Vec<u32>) -> Result<(), Refusal> {
        let begun = Instant::now();
        for _ in 0..reader.word().ok_or(CUT)? {
            let id = reader.u64().ok_or(CUT)?;
            self.pages.remove(&id);
            self.refused.remove(&id);
        }
        // Writes of tokens report a failure when the page is first read, whole pages at the end of this message.
        let (mut first, mut came) = (Ok(()), Came::default());
        self.take_tokens(reader, &mut came, &mut first)?;
        self.take_pages(reader, &mut came, &mut first)?;
        self.place(came)?;
        first?;
        for _ in 0..reader.word().ok_or(CUT)? {
            self.held(reader.u64().ok_or(CUT)?)?;
        }
        wire::done(out);
        wire::push_u64(out, self.bytes());
        wire::push_u64(out, self.pages.len() as u64);
        let clock = out.len();
        wire::push_u64(out, 0);
        let mut fetched = Vec::new();
        for _ in 0..reader.word().ok_or(CUT)? {
            fetched.push(self.held(reader.u64().ok_or(CUT)?)?);
        }
        // Each page once at most, so that an answer is no longer than what is held.
        if fetched.len() > self.pages.len() {
            return Err(CUT);
        }
        self.fetch(&fetched, out)?;
        let questions = reader.word().ok_or(CUT)?;
        if questions > 0 {
            self.answer_all(questions, &mut reader.clone(), out)?;
        }
        let nanos = begun.elapsed().as_nanos() as u64;
        (out[clock], out[clock + 1]) = (nanos as u32, (nanos >> 32) as u32);
        Ok(())
    }

    /// Reads tokens of pages that fill up. Why one could not be taken is noted with its page, or in `first`.
    fn take_tokens<'m>(
        &mut self,
        reader: &mut Reader<'m>,
        came: &mut Came<'m>,
        first: &mut Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        for _ in 0..reader.word().ok_or(CUT)? {
            let id = reader.u64().ok_or(CUT)?;
            let layer = reader.word().ok_or(CUT)? as usize;
            let (lane, count) = (reader.word().ok_or(CUT)?, reader.word().ok_or(CUT)?);
            let layout = self.pool.shape.config.layers.get(layer).ok_or(CUT)?.layout;
            let width = wire::token_words(&layout);
            let tokens = reader.words(width * count as usize).ok_or(CUT)?;
            if lane.checked_add(count).is_none_or(|end| end > PAGE) {
                return Err(CUT);
            }
            match self.page(id, layout.words()) {
                Ok(page) => {
                    let tokens = (lane..).zip(tokens.chunks_exact(width));
                    tokens.for_each(|(lane, token)| came.token(page, (layer, &layout), lane, token));
                    self.refused.remove(&id);
                }
                Err(refusal) => match self.refused.len() < REFUSED {
                    true => _ = self.refused.insert(id, refusal),
                    false => *first = (*first).and(Err(refusal)),
                },
            }
        }
        Ok(())
    }

    /// Reads whole pages, and room for some. Why the first could not be taken is noted in `first`.
    fn take_pages<'m>(
        &mut self,
        reader: &mut Reader<'m>,
        came: &mut Came<'m>,
        first: &mut Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        for _ in 0..reader.word().ok_or(CUT)? {
            let id = reader.u64().ok_or(CUT)?;
            let n = reader.word().ok_or(CUT)?;
            let room = n & wire::ROOM != 0;
            let words = if room { &[] } else { reader.words(n as usize).ok_or(CUT)? };
            match self.page(id, n & !wire::ROOM) {
                Ok(page) if !room => came.page(page, words),
                Ok(_) => {}
                Err(refusal) => *first = (*first).and(Err(refusal)),
            }
        }
        Ok(())
    }

    /// Works out questions, in their order.
    fn answer_all<'m>(
        &'m self,
        questions: u32,
        reader: &mut Reader<'m>,
        out: &mut Vec<u32>,
    ) -> Result<(), Refusal> {
        let mut asks = (0..questions).map(|_| self.ask(reader)).collect::<Result<Vec<_>, _>>()?;
        let most = self.pool.arenas.budget().max(TABLE);
        for (layer, last) in asks.iter().filter_map(Ask::turned) {
            if last > Position::MAX.0 {
                return Err(Refusal::Malformed);
            }
            let grown = self.pool.tables.grow_within(layer, last, most);
            grown.map_err(|error| self.refusal(error))?;
        }
        asks.iter_mut().for_each(|ask| ask.take_table(&self.pool));
        let words: usize = asks.iter().map(Ask::answer_words).sum();
        out.try_reserve(words).map_err(|_| Refusal::Memory { bytes: 4 * words as u64 })?;
        self.compute(&asks, out)
    }

    /// A page to be written, which is taken if it is not there.
    fn page(&mut self, id: u64, words: u32) -> Result<&mut Page, Refusal> {
        if !self.pages.contains_key(&id) {
            let shapes = self.pool.shape.config.layers.iter().map(|shape| shape.layout.words());
            let packed = self.pool.shape.codecs.iter().flat_map(|heads| heads.iter().flatten());
            if !shapes.chain(packed.map(|codec| codec.packed.words())).any(|known| known == words) {
                return Err(Refusal::Malformed);
            }
            let pages = self.pool.arenas.reserve(u64::from(words) * 4);
            let taken = pages
                .and_then(|mut pages| pages.take(0, words, Near::Any))
                .map_err(|error| self.refusal(error))?;
            self.pages.insert(id, taken);
        }
        let page = self.pages.get_mut(&id).filter(|page| page.bytes() == u64::from(words) * 4);
        page.filter(|page| !page.is_shared()).ok_or(Refusal::Malformed)
    }

    fn held(&self, id: u64) -> Result<&Page, Refusal> {
        if let Some(refusal) = self.refused.get(&id) {
            return Err(*refusal);
        }
        self.pages.get(&id).ok_or(Refusal::Missing { page: id })
    }

    fn refusal(&self, error: Error) -> Refusal {
        match error {
            Error::OutOfBudget { needed, available } => Refusal::Budget { needed, available },
            Error::OutOfMemory { bytes } => Refusal::Memory { bytes },
            Error::Device(CudaError::Driver { code, .. }) => Refusal::Device { code, lost: self.is_lost() },
            _ => Refusal::Malformed,
        }
    }

    fn device(&self) -> Option<&Arc<Device>> {
        self.pool.shape.config.backend.device()
    }

    /// Whether its device answers nothing but errors.
    fn is_lost(&self) -> bool {
        self.device().is_some_and(|device| device.is_lost())
    }

    /// Has a device write what came for its pages.
    fn place(&self, came: Came<'_>) -> Result<(), Refusal> {
        let Came { mut tokens, pages } = came;
        if let Some(device) = self.device() {
            let refusal = |error| self.refusal(error);
            tokens.sort_by_key(|(layer, ..)| *layer);
            for tokens in tokens.chunk_by(|(a, ..), (b, ..)| a == b) {
                let layout = &self.pool.shape.config.layers[tokens[0].0].layout;
                device
                    .place(layout, tokens.len(), |i, page, lane| {
                        let (_, address, to, words) = tokens[i];
                        wire::place_token(layout, words, page, lane);
                        (address, to)
                    })
                    .map_err(refusal)?;
            }
            device.write_all(&pages).map_err(refusal)?;
        }
        Ok(())
    }

    /// Adds the words of pages.
    fn fetch(&self, pages: &[&Page], out: &mut Vec<u32>) -> Result<(), Refusal> {
        if let Some(device) = self.device() {
            let places: Vec<_> =
                pages.iter().map(|page| (page.address(), page.bytes() as usize / 4)).collect();
            return device
                .read_all(&places, |words| out.extend_from_slice(words))
                .map_err(|e| self.refusal(e));
        }
        pages.iter().for_each(|page| out.extend_from_slice(page.words()));
        Ok(())
    }

    fn ask<'a>(&'a self, reader: &mut Reader<'a>) -> Result<Ask<'a>, Refusal> {
        let mut ask = Ask::read(&self.pool, reader).ok_or(CUT)?;
        let bytes = u64::from(ask.words()) * 4;
        let mut listed = 0;
        for _ in 0..reader.word().filter(|n| *n > 0).ok_or(CUT)? {
            let mut block = SmallVec::new();
            let pages = reader.word().filter(|n| (1..=BLOCK).contains(&(*n as usize))).ok_or(CUT)?;
            // Each page once at most, so that an answer is no longer than rows that came for pages that are held.
            listed += pages as usize;
            if listed > self.pages.len() {
                return Err(CUT);
            }
            for _ in 0..pages {
                let (id, live) = (reader.u64().ok_or(CUT)?, reader.word().ok_or(CUT)?);
                let (mut last, mut by) = (0, 0);
                if ask.codec.is_some() {
                    (last, by) = (reader.word().ok_or(CUT)?, reader.word().ok_or(CUT)?);
                }
                let page = self.held(id)?;
                if page.bytes() != bytes {
                    return Err(CUT);
                }
                block.push(Listed { page, live, last, by });
            }
            ask.blocks.push(block);
        }
        Ok(ask)
    }

    /// Adds the answers to questions, one after the other.
    fn compute(&self, asks: &[Ask<'_>], out: &mut Vec<u32>) -> Result<(), Refusal> {
        if let Some(device) = self.device() {
            return device.partials(asks, out).map_err(|error| self.refusal(error));
        }
        let compute = |ask: &Ask<'_>| ask.compute(&self.pool);
        let answers = match asks {
            [_, _, ..] if self.parallel => {
                let bytes: u64 = asks.iter().map(Ask::bytes_read).sum();
                let most = threads().min(asks.len()) as u64;
                side_by_side(asks, most.min(bytes / SHARE + 1) as usize, compute)
            }
            _ => asks.iter().map(compute).collect(),
        };
        answers.iter().for_each(|answer| out.extend_from_slice(bytemuck::cast_slice(answer)));
        Ok(())
    }
}

/// The refusal of a message that ends too early or cannot be right.
const CUT: Refusal = Refusal::Malformed;

/// Bytes of a table of rotations that a rank with a small budget has all the same.
const TABLE: u64 = 64 << 20;

/// The most pages without room that are remembered, so that questions about them are refused; the message that brings more fails whole.
const REFUSED: usize = 1 << 16;

/// Bytes of pages that a thread should have to read: they take it about as long as it takes to be started.
const SHARE: u64 = 1 << 20;

/// The results of `f` for all items, in their order, worked out by the calling thread and up to `threads - 1` others that end with the
/// call. Fewer do it where the system starts no more.
///
/// # Panics
/// If `f` does.
fn side_by_side<I: Sync, O: Send>(items: &[I], threads: usize, f: impl Fn(&I) -> O + Sync) -> Vec<O> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((i, item)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, items.get(i)?)))
        {
            done.push((i, f(item)));
        }
        done
    };
    let mut done = thread::scope(|scope| {
        let start = |_| thread::Builder::new().name("pikv-share".to_owned()).spawn_scoped(scope, work).ok();
        let others: Vec<_> = (1..threads).map_while(start).collect();
        let mut done = work();
        for other in others {
            match other.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

impl<'m> Came<'m> {
    fn token(&mut self, page: &mut Page, of: (usize, &Layout), lane: u32, token: &'m [u32]) {
        let (near, address) = (page.is_near(), page.address());
        let Some(words) = page.words_mut() else { return };
        match near {
            true => wire::place_token(of.1, token, words, lane),
            false => {
                words[lane as usize] = token[0];
                self.tokens.push((of.0, address, lane, token));
            }
        }
    }

    fn page(&mut self, page: &mut Page, from: &'m [u32]) {
        let (near, address) = (page.is_near(), page.address());
        let Some(words) = page.words_mut() else { return };
        let n = words.len();
        words.copy_from_slice(&from[..n]);
        if !near {
            self.pages.push((address, from));
        }
    }
}
