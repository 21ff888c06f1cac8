//! The store of a rank: pages by id, and the answers to messages.

use super::ask::{Ask, AskedPage};
use crate::attend_cuda::modules;
use crate::base::error::CudaError;
use crate::base::error::Error;
use crate::base::error::FabricError;
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

/// The pages of one rank, in an arena with a budget of its own, and the attention over them. The back end is that of its configuration, and
/// may differ from other ranks'.
///
/// A [`Fabric`](super::Fabric) delivers messages to it and returns its answers. It does not know sequences: a page has an id that is used
/// once in a session, and a request for an unknown id is an error.
#[derive(Debug)]
pub struct RankStore {
    pool: Pool,
    pages: HashMap<u64, Page>,
    /// Pages that could not be allocated when their tokens arrived, with the refusal.
    refused: HashMap<u64, Refusal>,
    session: u64,
    fingerprint: u64,
    /// Whether several threads compute the questions of a message.
    parallel: bool,
}

/// The page writes of a message: in host memory they are done at once, on a device all together.
#[derive(Default)]
struct PageWrites<'m> {
    /// Tokens: layer, page address, lane, and words.
    tokens: Vec<(usize, u64, u32, &'m [u32])>,
    /// Pages: address and words.
    pages: Vec<(u64, &'m [u32])>,
}

/// A hash of the configuration that two ranks must share.
pub(super) fn fingerprint(shape: &CacheShape) -> u64 {
    let CacheShape { config, frequencies, .. } = shape;
    let codecs: Vec<_> = config.codecs.iter().map(|rule| (rule.layer, rule.kv_head, &rule.codec)).collect();
    let text = format!("{VERSION} {:?} {frequencies:?} {codecs:?} {}", config.layers, config.lanes.rows());
    // FNV-1a: it detects mistakes, not attacks.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl RankStore {
    /// A store for the pages of a cache of this configuration, with at most `budget` bytes, in the memory of the configuration's back end.
    /// Memory is allocated with the first pages. Where keys are stored before rotation, the rotation table takes at most as much again, or
    /// 64 MiB if that is more; a larger one gives [`FabricError::Memory`].
    ///
    /// [`FabricError::Memory`]: crate::base::error::FabricError::Memory
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid configuration; [`Error::Device`] if the kernels that it needs do not load.
    pub fn new(config: &CacheConfig, budget: u64) -> Result<RankStore, Error> {
        let config = CacheConfig { budget, tiers: Tiers::new(), ..config.clone() }.shards(ShardMap::ONE);
        let pool = Pool::new(&Arc::new(CacheShape::new(config, false)?))?;
        if let Some(device) = pool.shape.config.backend.device() {
            modules::load(device, &pool.shape)?;
        }
        let fingerprint = fingerprint(&pool.shape);
        let (pages, refused) = (HashMap::new(), HashMap::new());
        Ok(RankStore { pool, pages, refused, session: 0, fingerprint, parallel: false })
    }

    /// Sets whether several threads compute the questions of a message. They are started for that message, at most as many as the rayon
    /// pool in which [`RankStore::answer`] is called has (1 without the feature `rayon`). The pool's own threads are not used: while one
    /// waits for its share it would take other work of the pool, which may wait for this very answer.
    pub fn parallel(mut self, on: bool) -> RankStore {
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

    /// Whether a message that [asks the rank to end](RankStore::is_last) says that another rank was lost. A transport that ends by waiting
    /// for all ranks must then not wait.
    pub fn lost(message: &[u32]) -> bool {
        RankStore::is_last(message) && message.get(HEADER).is_some_and(|lost| *lost != 0)
    }

    /// Checks that the pages held match the arena's counts.
    ///
    /// # Errors
    /// [`FabricError::Counts`] for other bytes, [`FabricError::TwoOwners`] for a page that is held twice.
    pub fn check(&self) -> Result<(), FabricError> {
        let held: u64 = self.pages.values().map(Page::bytes).sum();
        let counted: u64 = self.pool.arenas.bytes_by_shard().sum();
        let taken = self.bytes();
        if held != counted || counted != taken {
            return Err(FabricError::Counts { held, counted, taken });
        }
        match self.pages.iter().find(|(_, page)| page.is_shared()) {
            Some((&page, _)) => Err(FabricError::TwoOwners { page }),
            None => Ok(()),
        }
    }

    /// Executes a message and returns the answer; `None` for a message without one.
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
        // Failed writes of tokens are reported when the page is first read, those of whole pages at the end of this message.
        let (mut first, mut writes) = (Ok(()), PageWrites::default());
        self.take_tokens(reader, &mut writes, &mut first)?;
        self.take_pages(reader, &mut writes, &mut first)?;
        self.place(writes)?;
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
        // Each page at most once, so that an answer is no longer than the pages held.
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

    /// Reads tokens of pages that are not full. A token that is refused is recorded with its page, or in `first`.
    fn take_tokens<'m>(
        &mut self,
        reader: &mut Reader<'m>,
        writes: &mut PageWrites<'m>,
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
                    tokens.for_each(|(lane, token)| writes.token(page, (layer, &layout), lane, token));
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

    /// Reads whole pages, and requests for room. The first refusal is recorded in `first`.
    fn take_pages<'m>(
        &mut self,
        reader: &mut Reader<'m>,
        writes: &mut PageWrites<'m>,
        first: &mut Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        for _ in 0..reader.word().ok_or(CUT)? {
            let id = reader.u64().ok_or(CUT)?;
            let n = reader.word().ok_or(CUT)?;
            let room = n & wire::ROOM != 0;
            let words = if room { &[] } else { reader.words(n as usize).ok_or(CUT)? };
            match self.page(id, n & !wire::ROOM) {
                Ok(page) if !room => writes.page(page, words),
                Ok(_) => {}
                Err(refusal) => *first = (*first).and(Err(refusal)),
            }
        }
        Ok(())
    }

    /// Computes questions, in order.
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

    /// The page with this id, allocated if there is none.
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

    /// Whether every call to its device fails.
    fn is_lost(&self) -> bool {
        self.device().is_some_and(|device| device.is_lost())
    }

    /// Has a device execute the writes to its pages.
    fn place(&self, writes: PageWrites<'_>) -> Result<(), Refusal> {
        let PageWrites { mut tokens, pages } = writes;
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

    /// Appends the words of pages.
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
            // Each page at most once, so that an answer is bounded by rows received and pages held.
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
                block.push(AskedPage { page, live, last, by });
            }
            ask.blocks.push(block);
        }
        Ok(ask)
    }

    /// Appends the answers to questions, in order.
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

/// The refusal of a message that ends too early or is invalid.
const CUT: Refusal = Refusal::Malformed;

/// Bytes that a table of rotations may take on a rank with a small budget.
const TABLE: u64 = 64 << 20;

/// Most refused pages that are remembered, to refuse questions about them; a message with more fails as a whole.
const REFUSED: usize = 1 << 16;

/// Bytes of pages that a thread should read at least: reading them takes about as long as starting it.
const SHARE: u64 = 1 << 20;

/// The results of `f` for all items, in order, computed by the calling thread and up to `threads - 1` others that end with the call. Fewer
/// if the system starts no more.
///
/// # Panics
/// If `f` panics.
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

impl<'m> PageWrites<'m> {
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
