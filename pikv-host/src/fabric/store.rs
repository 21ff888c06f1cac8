//! What a rank keeps: pages, by their numbers; and what it does when it is asked.

use crate::arena::{Near, Page};
use crate::block::{Block, Common, PackedBlock};
use crate::cache::{Cache, Inner};
use crate::config::CacheConfig;
use crate::error::Error;
use crate::fabric::wire::{self, HEADER, Header, Reader, Refusal, VERSION, flag, kind};
use crate::job::each;
use crate::reduce::{Tree, levels};
use crate::tiers::Tiers;
use pikv_core::attend::{BLOCK, Sight};
use pikv_core::codec::read::{PackedRef, REBUILT};
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::page::PAGE;
use pikv_core::shard::ShardMap;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The pages of one rank, in an arena and under a budget of its own, and the routines that read them.
///
/// A [`Fabric`](super::Fabric) brings it messages, and takes its answers back. It knows nothing of sequences: a page has a
/// number that is used once in a session, and what is asked for and is not there is an error, never another page.
#[derive(Debug)]
pub struct Store {
    inner: Arc<Inner>,
    pages: HashMap<u64, Page>,
    /// Pages that could not be taken when tokens came for them, and why.
    refused: HashMap<u64, Refusal>,
    session: u64,
    fingerprint: u64,
    /// Whether questions are worked out by the threads of the rayon pool.
    parallel: bool,
}

/// A question: rows of one KV head, and the blocks that they read.
struct Ask<'a> {
    layer: usize,
    head: usize,
    rows: usize,
    most: usize,
    flags: u32,
    softcap: Option<f32>,
    q: &'a [f32],
    sights: Vec<(Sight, Sight)>,
    folded: &'a [[f32; LANES]],
    start: &'a [f32],
    blocks: Vec<SmallVec<[Listed<'a>; BLOCK]>>,
}

/// A page of a question.
struct Listed<'a> {
    words: &'a [u32],
    live: u32,
    last: u32,
    by: u32,
}

/// What two ranks must have in common.
pub(crate) fn fingerprint(inner: &Inner) -> u64 {
    let config = &inner.config;
    let codecs: Vec<_> = config.codecs.iter().map(|rule| (rule.layer, rule.kv_head, &rule.codec)).collect();
    let text = format!("{VERSION} {:?} {codecs:?} {}", config.layers, inner.bundle());
    // FNV-1a: it tells mistakes apart, not attacks.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl Store {
    /// A store for the pages of a cache of this configuration, of which it has `budget` bytes at most. No memory is taken
    /// before there are pages.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub fn new(config: &CacheConfig, budget: u64) -> Result<Store, Error> {
        let config = CacheConfig { budget, tiers: Tiers::new(), ..config.clone() }.shards(ShardMap::ONE);
        let inner = Cache::new(config)?.inner;
        let fingerprint = fingerprint(&inner);
        let (pages, refused) = (HashMap::new(), HashMap::new());
        Ok(Store { inner, pages, refused, session: 0, fingerprint, parallel: false })
    }

    /// Has several questions worked out at once, by the threads of the rayon pool that [`Store::answer`] is called in.
    pub fn parallel(mut self, on: bool) -> Store {
        self.parallel = on;
        self
    }

    /// Bytes of pages held.
    pub fn bytes(&self) -> u64 {
        self.inner.arenas.taken()
    }

    /// Whether a message asks the rank to end.
    pub fn is_last(message: &[u32]) -> bool {
        Reader::new(message).header().is_some_and(|header| header.kind == kind::BYE)
    }

    /// Checks that the pages are those that the arena counts.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        let held: u64 = self.pages.values().map(Page::bytes).sum();
        let counted: u64 = self.inner.arenas.bytes_by_shard().sum();
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
        const CUT: Refusal = Refusal::Malformed;
        let begun = Instant::now();
        for _ in 0..reader.word().ok_or(CUT)? {
            let id = reader.u64().ok_or(CUT)?;
            self.pages.remove(&id);
            self.refused.remove(&id);
        }
        // A token or page that cannot be kept is told when the page is asked for, or at the end where it came whole.
        let mut first = Ok(());
        for _ in 0..reader.word().ok_or(CUT)? {
            let id = reader.u64().ok_or(CUT)?;
            let layer = reader.word().ok_or(CUT)? as usize;
            let (lane, count) = (reader.word().ok_or(CUT)?, reader.word().ok_or(CUT)?);
            let layout = self.inner.config.layers.get(layer).ok_or(CUT)?.layout;
            let width = wire::token_words(&layout);
            let tokens = reader.words(width * count as usize).ok_or(CUT)?;
            if lane + count > PAGE {
                return Err(CUT);
            }
            match self.page(id, layout.words()) {
                Ok(words) => {
                    for (lane, token) in (lane..).zip(tokens.chunks_exact(width)) {
                        wire::place_token(&layout, token, words, lane);
                    }
                }
                Err(refusal) => _ = self.refused.insert(id, refusal),
            }
        }
        for _ in 0..reader.word().ok_or(CUT)? {
            let id = reader.u64().ok_or(CUT)?;
            let n = reader.word().ok_or(CUT)?;
            let from = reader.words(n as usize).ok_or(CUT)?;
            match self.page(id, n) {
                Ok(words) => words.copy_from_slice(from),
                Err(refusal) => first = first.and(Err(refusal)),
            }
        }
        first?;
        for _ in 0..reader.word().ok_or(CUT)? {
            self.held(reader.u64().ok_or(CUT)?)?;
        }
        wire::done(out);
        wire::push_u64(out, self.bytes());
        wire::push_u64(out, self.pages.len() as u64);
        let clock = out.len();
        wire::push_u64(out, 0);
        for _ in 0..reader.word().ok_or(CUT)? {
            out.extend_from_slice(self.held(reader.u64().ok_or(CUT)?)?);
        }
        let n = reader.word().ok_or(CUT)?;
        let stop = |out: &mut Vec<u32>| {
            let nanos = begun.elapsed().as_nanos() as u64;
            (out[clock], out[clock + 1]) = (nanos as u32, (nanos >> 32) as u32);
        };
        if n == 0 {
            stop(out);
            return Ok(());
        }
        let reach = reader.word().ok_or(CUT)?;
        self.inner.tables.grow(reach).map_err(|_| Refusal::Memory { bytes: u64::from(reach) * 4 })?;
        let mut reader = reader.clone();
        let asks = (0..n).map(|_| self.ask(&mut reader)).collect::<Result<Vec<_>, _>>()?;
        let compute = |ask: &Ask<'_>| self.compute(ask);
        let answers = if self.parallel { each(&asks, compute) } else { asks.iter().map(compute).collect() };
        answers.iter().for_each(|answer| out.extend_from_slice(bytemuck::cast_slice(answer)));
        stop(out);
        Ok(())
    }

    /// The words of a page to be written, which is taken if it is not there.
    fn page(&mut self, id: u64, words: u32) -> Result<&mut [u32], Refusal> {
        if !self.pages.contains_key(&id) {
            let shapes = self.inner.config.layers.iter().map(|shape| shape.layout.words());
            let packed = self.inner.codecs.iter().flat_map(|heads| heads.iter().flatten());
            if !shapes.chain(packed.map(|codec| codec.packed.words())).any(|known| known == words) {
                return Err(Refusal::Malformed);
            }
            let pages = self.inner.arenas.reserve(u64::from(words) * 4);
            let taken =
                pages.and_then(|mut pages| pages.take(0, words, Near::Any)).map_err(|error| match error {
                    Error::OutOfBudget { needed, available } => Refusal::Budget { needed, available },
                    Error::OutOfMemory { bytes } => Refusal::Memory { bytes },
                    _ => Refusal::Malformed,
                })?;
            self.pages.insert(id, taken);
        }
        let page = self.pages.get_mut(&id).and_then(Page::words_mut);
        page.filter(|page| page.len() == words as usize).ok_or(Refusal::Malformed)
    }

    fn held(&self, id: u64) -> Result<&[u32], Refusal> {
        if let Some(refusal) = self.refused.get(&id) {
            return Err(*refusal);
        }
        self.pages.get(&id).map(Page::words).ok_or(Refusal::Missing { page: id })
    }

    fn ask<'a>(&'a self, reader: &mut Reader<'a>) -> Result<Ask<'a>, Refusal> {
        let read = |reader: &mut Reader<'a>| {
            let (layer, head) = (reader.word()? as usize, reader.word()? as usize);
            let (rows, most, flags) = (reader.word()? as usize, reader.word()? as usize, reader.word()?);
            let cap = f32::from_bits(reader.word()?);
            let layout = &self.inner.config.layers.get(layer)?.layout;
            let q = bytemuck::cast_slice(reader.words(layout.k_channels() as usize * rows)?);
            let mut sights = Vec::with_capacity(rows);
            for sight in reader.words(4 * rows)?.as_chunks::<4>().0 {
                let [floor, lo, sinks, hi] = *sight;
                sights.push((Sight { floor, lo, sinks, hi: hi as i32 }, Sight::NONE));
            }
            let (mut folded, mut start): (&[[f32; LANES]], &[f32]) = (&[], &[]);
            let packed = flags & flag::PACKED != 0;
            if packed {
                let codec = self.inner.codecs[layer].get(head)?.as_ref()?;
                let cols = codec.packed.k_cols() as usize;
                folded = bytemuck::cast_slice::<_, f32>(reader.words(cols * rows * LANES)?).as_chunks().0;
                start = bytemuck::cast_slice(reader.words(rows)?);
            }
            let softcap = (flags & flag::CAPPED != 0).then_some(cap);
            Some(Ask {
                layer,
                head,
                rows,
                most,
                flags,
                softcap,
                q,
                sights,
                folded,
                start,
                blocks: Vec::new(),
            })
        };
        let mut ask = read(reader).ok_or(Refusal::Malformed)?;
        let layout = &self.inner.config.layers[ask.layer].layout;
        let words = match &self.inner.codecs[ask.layer].get(ask.head).ok_or(Refusal::Malformed)? {
            Some(codec) if ask.flags & flag::PACKED != 0 => codec.packed.words(),
            _ => layout.words(),
        };
        for _ in 0..reader.word().ok_or(Refusal::Malformed)? {
            let mut block = SmallVec::new();
            for _ in 0..reader.word().filter(|n| *n as usize <= BLOCK).ok_or(Refusal::Malformed)? {
                let listed = |reader: &mut Reader<'_>| {
                    let (id, live) = (reader.u64()?, reader.word()?);
                    let packed = ask.flags & flag::PACKED != 0;
                    let (last, by) = if packed { (reader.word()?, reader.word()?) } else { (0, 0) };
                    Some((id, live, last, by))
                };
                let (id, live, last, by) = listed(reader).ok_or(Refusal::Malformed)?;
                let page = self.held(id)?;
                if page.len() != words as usize {
                    return Err(Refusal::Malformed);
                }
                block.push(Listed { words: page, live, last, by });
            }
            ask.blocks.push(block);
        }
        Ok(ask)
    }

    /// The partial results of a question's blocks, each with the weights behind it if they are wanted.
    fn compute(&self, ask: &Ask<'_>) -> Vec<f32> {
        let shape = &self.inner.config.layers[ask.layer];
        let (lanes, layout) = (self.inner.config.lanes, &shape.layout);
        let codec = self.inner.codecs[ask.layer][ask.head].as_ref().filter(|_| ask.flags & flag::PACKED != 0);
        let table = shape.rope.and_then(|rope| self.inner.tables.get(&rope));
        let rotation = table.as_ref().zip(shape.rope).map(|(table, rope)| table.rotation(rope));
        let acc_rows = codec.map_or(layout.acc_rows(), |codec| codec.packed.acc_rows());
        let len = Partial::len(ask.rows, acc_rows);
        let mut rebuilt = vec![[0.0; LANES]; if codec.is_some() && rotation.is_some() { REBUILT } else { 0 }];
        let common = Common {
            layout,
            sights: &ask.sights,
            ring: false,
            softcap: ask.softcap,
            most: ask.most,
            q: ask.q,
            rotation,
        };
        let mut block = |i: usize, part: &mut [f32], raw: Option<&mut [[f32; LANES]]>| {
            let pages = &ask.blocks[i];
            let after = ask.blocks.get(i + 1).map_or(&[][..], |pages| pages);
            let next = [0, 1].map(|i| after.get(i).map_or(&[][..], |page| page.words));
            let out = Partial::new(part, ask.rows, acc_rows);
            match codec {
                Some(codec) => {
                    let refs = pages.iter().map(|page| {
                        let Listed { words, live, last, by } = *page;
                        PackedRef { words, live, last, by }
                    });
                    let list: SmallVec<[PackedRef<'_>; BLOCK]> = refs.collect();
                    lanes.run(PackedBlock {
                        common,
                        codec,
                        pages: &list,
                        next: next[0],
                        folded: ask.folded,
                        start: ask.start,
                        rebuilt: &mut rebuilt,
                        out,
                        first: 0,
                        raw,
                    });
                }
                None => {
                    let refs = pages.iter().map(|page| PageRef { words: page.words, live: page.live });
                    let list: SmallVec<[PageRef<'_>; BLOCK]> = refs.collect();
                    lanes.run(Block { common, pages: &list, next, out, first: 0, raw });
                }
            }
        };
        if ask.flags & flag::FAST != 0 {
            let mut all = vec![0.0; len];
            let tree = Tree { lanes, acc_rows, rows: ask.rows };
            let index: Vec<u32> = (0..ask.blocks.len() as u32).collect();
            let level = index.last().map_or(0, |last| levels(*last));
            let mut leaf = |i: usize, part: &mut [f32], _: &mut Vec<Vec<f32>>| block(i, part, None);
            tree.reduce(&index, level, 0, 0, &mut leaf, &mut all, &mut Vec::new());
            return all;
        }
        let mut all = Vec::new();
        for (i, pages) in ask.blocks.iter().enumerate() {
            let at = all.len();
            all.resize(at + len, 0.0);
            if ask.flags & flag::RAW == 0 {
                block(i, &mut all[at..], None);
                continue;
            }
            let mut raw = vec![[0.0; LANES]; ask.rows * pages.len()];
            block(i, &mut all[at..], Some(&mut raw));
            all.extend_from_slice(raw.as_flattened());
        }
        all
    }
}
