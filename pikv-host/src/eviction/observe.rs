//! Passes a step to a layer's policy, and counts hits and misses for routers and sinks.

use crate::attend::feedback::HeadFeedback;
use crate::attend::mass::PageWeights;
use crate::base::chunks::Chunks;
use crate::base::ids::{PageId, Place, run_place};
use crate::base::parallel::MANY;
use crate::base::parallel::each_mut;
use crate::codec::HeadCodec;
use crate::config::HeadCodecs;
use crate::config::shape::CacheShape;
use crate::config::sharing::Sharing;
use crate::memory::pool::Pool;
use crate::metrics::Reused;
use crate::metrics::report::StepReport;
use crate::pages::entry::Entry;
use crate::pages::filing::LayerPages;
use crate::pages::find::Finder;
use crate::pages::head::HeadPages;
use crate::pages::run::Run;
use crate::pages::tags::Tags;
use crate::policy::page::TokenPage;
use crate::policy::rule::Rule;
use crate::policy::{HeadSeen, Positions, Seen};
use crate::router::met::combined;
use pikv_core::attend::filled;
use pikv_core::page::{PAGE, Position};
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// A token that a step moved from the ring to a page.
#[derive(Clone, Copy, Debug)]
struct FiledToken {
    position: u32,
    run: usize,
    ordinal: u32,
    lane: u32,
}

impl LayerPages {
    /// Calls the policy for the rows of a step, after tokens that left the ring are filed. The policy sees each row as if
    /// the step had ended with it: the tokens in the ring, and the page of each token, are those at that length.
    ///
    /// `feeds` are those of the heads in order, or empty if there was no attention. Heads are observed independently, in
    /// any order; the pages of a head come in the order in which attention read them.
    pub fn observe(
        &mut self,
        inner: &CacheShape,
        shape: &LayerShape,
        old: u32,
        new: u32,
        feeds: &mut [HeadFeedback],
        reused: Option<&mut Vec<Reused>>,
    ) {
        let sharing = self.sharing(inner, shape);
        let LayerPages { heads, store, rule, codecs, tags, first_tile, filed, .. } = self;
        let Some(rule) = rule.as_deref().filter(|rule| rule.keeps()) else { return };
        let observation = Observation {
            rule,
            inner,
            shape,
            codecs,
            tags,
            sharing,
            first_tile: *first_tile,
            filed: *filed,
            sinks: store.sinks,
            old,
            new,
            reused: reused.is_some(),
        };
        let pages: usize = feeds.iter().map(|feed| feed.weighed.pages.len()).sum();
        let mut told = feeds.iter_mut();
        let mut heads: SmallVec<[(&mut HeadPages, Option<&mut HeadFeedback>); 16]> =
            heads.iter_mut().map(|head| (head, told.next())).collect();
        let tell = |h: usize, (head, feed): &mut (&mut HeadPages, Option<&mut HeadFeedback>)| {
            observation.tell(h, head, feed.as_deref_mut());
        };
        if pages >= MANY {
            each_mut(&mut heads, tell);
        } else {
            heads.iter_mut().enumerate().for_each(|(h, head)| tell(h, head));
        }
        drop(heads);
        if let Some(reused) = reused {
            feeds.iter_mut().for_each(|feed| reused.append(&mut feed.reused));
        }
    }

    /// The policy's state of a head at length `len`.
    pub fn own(&self, rule: &Rule, head: usize, len: u32) -> &[f32] {
        &self.heads[head].own[rule.version(len) * rule.head_words..][..rule.head_words]
    }

    /// Adds the hits and misses of `rows` of layer `l` to a report, and those of each row if the report asks for them.
    pub fn count_into(
        &self,
        pool: &Pool,
        l: usize,
        part: usize,
        rows: Range<u32>,
        feeds: &[HeadFeedback],
        report: &mut StepReport,
    ) {
        let StepReport { experts, hits, misses, held, lost, by_part, remote, .. } = report;
        let of = l * *experts..(l + 1) * *experts;
        self.count(pool, l, rows, (&mut held[of.clone()], &mut lost[of.clone()]));
        if pool.hits().is_none() {
            return;
        }
        let (hits, misses) = (&mut hits[of.clone()], &mut misses[of]);
        let all = || feeds.iter().flat_map(|feed| &feed.met);
        for met in all() {
            hits[usize::from(met.expert)] += f64::from(met.held) / f64::from(PAGE);
            misses[usize::from(met.expert)] += f64::from(met.missed()) / f64::from(PAGE);
        }
        if let Some(sum) = remote.last_mut() {
            *sum += feeds.iter().map(|feed| feed.far).sum::<u64>();
        }
        if let Some(by_part) = by_part {
            let from = by_part.met.len();
            by_part.met.extend(all().map(|met| (l, part, *met)));
            combined(&mut by_part.met, from, |(.., met)| met);
        }
    }

    /// For each expert that `rows` chose, adds the tokens of the run in which its tokens are filed now, over all heads: those in the
    /// first tier to `held`, the others to `lost`.
    fn count(&self, pool: &Pool, l: usize, rows: Range<u32>, (held, lost): (&mut [u64], &mut [u64])) {
        let sharing = self.sharing(&pool.shape, &pool.shape.config.layers[l]);
        let mut times: SmallVec<[u64; 32]> = SmallVec::from_elem(0, held.len());
        rows.for_each(|row| self.experts(&pool.shape, row).for_each(|e| times[usize::from(e)] += 1));
        for (e, times) in times.into_iter().enumerate().filter(|(_, times)| *times > 0) {
            let c = 1 + usize::from(sharing.run(e as u16, self.filed));
            for run in self.heads.iter().map(|head| &head.runs[c]) {
                let near = run.live() - if pool.tiers.is_some() { run.away() } else { 0 };
                held[e] += times * u64::from(near);
                lost[e] += times * u64::from(run.filed - near);
            }
        }
    }
}

/// A page by its index. Its entry is loaded only when the policy asks for it: most policies do not, and it is not in the caches.
#[derive(Debug)]
struct LazyPage<'a> {
    entries: &'a Chunks<Entry>,
    i: usize,
}

impl LazyPage<'_> {
    fn get(&self) -> &Entry {
        &self.entries[self.i]
    }
}

impl TokenPage for LazyPage<'_> {
    fn position(&self, codec: Option<&HeadCodec>, lane: u32) -> Option<u32> {
        self.get().position(codec, lane)
    }

    fn words(&self) -> Option<&[u32]> {
        self.get().words()
    }

    fn fetch(&self) -> Option<Arc<[u32]>> {
        self.get().fetch()
    }

    fn packing<'a>(&'a self, codec: Option<&'a HeadCodec>) -> Option<(&'a HeadCodec, u32)> {
        self.get().packing(codec)
    }
}

/// Parameters of all heads of a layer while its policy observes a step.
struct Observation<'a> {
    rule: &'a Rule,
    inner: &'a CacheShape,
    shape: &'a LayerShape,
    codecs: &'a HeadCodecs,
    tags: &'a Tags,
    sharing: Sharing,
    first_tile: u32,
    filed: u32,
    sinks: u32,
    old: u32,
    new: u32,
    /// Whether reuses of pages are recorded.
    reused: bool,
}

/// Rows that are observed together.
struct ObservedRows<'a> {
    index: usize,
    /// Rows whose weights the policy needs.
    told: Range<u32>,
    /// Length of the sequence after the last of the rows, and tokens outside the ring at that length.
    len: u32,
    left: u32,
    /// Tokens that the step moved to pages.
    moved: &'a [FiledToken],
    /// Tokens that the head held.
    resident: u32,
}

impl Observation<'_> {
    /// Passes the rows of one head to the policy.
    fn tell(&self, h: usize, head: &mut HeadPages, mut feed: Option<&mut HeadFeedback>) {
        let Observation { rule, inner, shape, old, .. } = *self;
        let ring = inner.store.ring;
        let moved = self.moved(h, head, ring.left(old));
        let mut before = old;
        for (index, (rows, told)) in rule.cuts(old, self.new).enumerate() {
            self.turn(head, before, rows.end);
            let left = ring.left(rows.end);
            let (done, late) = moved.split_at(moved.partition_point(|token| token.position < left));
            let since = done.partition_point(|token| token.position < ring.left(before));
            self.carry(head, &done[since..], rows.end);
            before = rows.end;
            let Some(feed) = feed.as_deref_mut() else { continue };
            let of = |row: u32| rows.contains(&(row + old));
            let met = || feed.met.iter().filter(|met| of(met.row));
            let (held, missed): (u32, u32) =
                met().fold((0, 0), |(held, missed), met| (held + met.held, missed + met.missed()));
            let mut asked = 0;
            let mut last = None;
            for met in met() {
                asked += u32::from(last.replace(met.row) != Some(met.row));
            }
            let group = shape.group();
            let width = group as usize * shape.layout.k_dim as usize;
            let at = (rows.start - old) as usize * width..(rows.end - old) as usize * width;
            let seen = HeadSeen {
                layer: rule.layer,
                kv_head: h,
                group,
                first: Position(rows.start),
                rows: rows.len() as u32,
                queries: feed.queries.get(at).unwrap_or_default(),
                hits: held as f32 / PAGE as f32,
                misses: missed as f32 / PAGE as f32,
                asked,
                frequencies: rule.frequencies.as_ref(),
            };
            let own = &mut head.own[rule.version(rows.end) * rule.head_words..];
            rule.eviction.policy.observe_head(&seen, &mut own[..rule.head_words]);
            if rule.words > 0 && !told.is_empty() {
                // The first of the rows read tokens from `floor` on in the ring.
                let floor = (told.start + 1).saturating_sub(ring.window()).min(feed.filed);
                let from = done.partition_point(|token| token.position < floor);
                follow(&mut feed.weighed, index, &done[from..]);
                let filed: u32 = head.runs.iter().map(|(_, run)| run.live()).sum();
                let sinks = |left: u32| left.min(self.sinks);
                let late = late.len() as u32 + sinks(self.filed) - sinks(left);
                let resident = ring.resident(rows.end).0 + filed - late;
                self.pages(
                    h,
                    head,
                    feed,
                    &ObservedRows { index, told, len: rows.end, left, moved: &moved, resident },
                );
            }
        }
    }

    /// Passes the pages of a head to the policy, one by one.
    fn pages(&self, h: usize, head: &mut HeadPages, feed: &mut HeadFeedback, cut: &ObservedRows<'_>) {
        let HeadFeedback { weighed, reused, .. } = feed;
        let mut at = 0;
        while let Some(PageId { place, .. }) = weighed.pages.get(at) {
            at = match place {
                Place::Sinks => at + 1,
                Place::Ring => self.ring(h, head, weighed, at, cut),
                Place::Run(e) => self.run(h, &mut head.runs[usize::from(*e) + 1], weighed, at, cut, reused),
            };
        }
    }

    /// The fields that are equal for all pages of a cut.
    fn seen(&self, h: usize, page: PageId, cut: &ObservedRows<'_>) -> Seen<'static> {
        let ObservedRows { ref told, resident, .. } = *cut;
        Seen {
            layer: self.rule.layer,
            kv_head: h,
            group: self.shape.group(),
            first: Position(told.start),
            rows: told.len() as u32,
            page,
            live: 0,
            positions: Positions::first(0),
            mass: &[0.0; LANES],
            resident,
        }
    }

    /// Observes pages of the ring from index `from` on; returns the index of the first page elsewhere.
    fn ring(
        &self,
        h: usize,
        head: &mut HeadPages,
        weighed: &PageWeights,
        from: usize,
        cut: &ObservedRows<'_>,
    ) -> usize {
        let mut kept = head.ring.states_mut().version_mut(self.rule.version(cut.len));
        let mut at = from;
        while let Some(&page) = weighed.pages.get(at).filter(|page| page.place == Place::Ring) {
            at += 1;
            let Some((mass, _)) = weighed.cut(at - 1, cut.index) else { continue };
            let first = page.ordinal * PAGE;
            let below = |end: u32| filled(end.saturating_sub(first).min(PAGE));
            let live = below(cut.len) & !below(cut.left);
            let tile = page.ordinal.wrapping_sub(self.first_tile) as usize;
            if let Some((rows, _)) = kept.page_mut(tile).filter(|_| live != 0) {
                // Lanes of tokens that left the ring since, such as sinks, may have mass.
                let mass = &of_lanes(mass, live);
                let seen = Seen { live, positions: Positions::first(first), mass, ..self.seen(h, page, cut) };
                self.rule.observe(&seen, rows);
            }
        }
        at
    }

    /// Observes pages of an expert from index `from` on; returns the index of the first page elsewhere.
    fn run(
        &self,
        h: usize,
        run: &mut Run,
        weighed: &PageWeights,
        from: usize,
        cut: &ObservedRows<'_>,
        reused: &mut Vec<Reused>,
    ) -> usize {
        let place = weighed.pages[from].place;
        // Pages from this ordinal on have tokens that the step filed: some were not filed at the time of attention, or are not observed
        // yet.
        let new = cut.moved.iter().filter(|token| run_place(token.run) == place);
        let new = new.map(|token| token.ordinal).min().unwrap_or(u32::MAX);
        let codec = self.codecs[h].as_ref();
        let Run { entries, kept, .. } = run;
        let mut kept = kept.version_mut(self.rule.version(cut.len));
        // Shared by thousands of pages in a step.
        let all = self.seen(h, weighed.pages[from], cut);
        let (mut at, mut finder) = (from, Finder::new(entries));
        while let Some(&page) = weighed.pages.get(at).filter(|page| page.place == place) {
            at += 1;
            let Some((mut mass, mut live)) = weighed.cut(at - 1, cut.index) else { continue };
            let Some(i) = finder.index(page.ordinal) else { continue };
            let Some((rows, used)) = kept.page_mut(i) else { continue };
            let entry = LazyPage { entries, i };
            let own;
            if page.ordinal >= new {
                let entry = entry.get();
                let filed = |lane: &u32| entry.position(codec, *lane).is_some_and(|p| p < cut.left);
                let filed = (0..entry.fill).filter(filed).fold(0, |filed, lane| filed | 1 << lane);
                live = entry.live & filed;
                own = of_lanes(mass, live);
                mass = &own;
            }
            if live == 0 {
                continue;
            }
            let seen = Seen { page, live, positions: Positions::page(&entry, codec), mass, ..all };
            if self.reused && seen.used(1.0) {
                // A page without a recorded use counts as used when its last token came.
                let before = if *used == 0 { entry.get().last().unwrap_or_default() + 1 } else { *used };
                let (layer, kv_head) = (seen.layer as u32, h as u32);
                // The last use may have been rolled back.
                let gap = cut.len.checked_sub(before).filter(|gap| *gap > 0);
                reused.extend(gap.map(|gap| Reused { layer, kv_head, gap }));
                *used = cut.len;
            }
            self.rule.observe(&seen, rows);
        }
        at
    }

    /// Tokens from position `from` on that are in pages of experts, by position.
    fn moved(&self, h: usize, head: &HeadPages, from: u32) -> SmallVec<[FiledToken; 4]> {
        let codec = self.codecs[h].as_ref();
        let mut moved: SmallVec<[FiledToken; 4]> = SmallVec::new();
        // Mostly one token. Other runs are skipped, because each would be fetched from memory.
        let run = |position| {
            let home = self.tags.experts(self.inner, position).next()?;
            Some(1 + usize::from(self.sharing.run(home, position)))
        };
        let mut runs: SmallVec<[usize; 4]> = (from..self.filed).filter_map(run).collect();
        runs.sort_unstable();
        runs.dedup();
        for (c, run) in runs.into_iter().map(|c| (c, &head.runs[c])) {
            let lanes = run
                .entries
                .iter()
                .rev()
                .flat_map(|entry| (0..entry.fill).rev().map(move |lane| (entry.ordinal, lane, entry)));
            let tokens = lanes.map_while(|(ordinal, lane, entry)| {
                let position = entry.position(codec, lane).filter(|position| *position >= from)?;
                Some(FiledToken { position, run: c, ordinal, lane })
            });
            moved.extend(tokens);
        }
        moved.sort_unstable_by_key(|token| token.position);
        moved
    }

    /// Copies the version of length `from` to that of length `to`.
    fn turn(&self, head: &mut HeadPages, from: u32, to: u32) {
        let rule = self.rule;
        if rule.versions == 1 {
            return;
        }
        let (from, to) = (rule.version(from), rule.version(to));
        let runs = head.runs.iter_mut().map(|(_, run)| &mut run.kept);
        runs.chain([head.ring.states_mut()]).for_each(|kept| kept.turn(from, to));
        let words = rule.head_words;
        head.own.copy_within(from * words..(from + 1) * words, to * words);
    }

    /// Copies the policy's state of tokens from the ring to their pages, as of `len` tokens.
    fn carry(&self, head: &mut HeadPages, moved: &[FiledToken], len: u32) {
        let HeadPages { runs, ring, .. } = head;
        let version = self.rule.version(len);
        for token in moved {
            let tile = (token.position / PAGE).wrapping_sub(self.first_tile) as usize;
            let run = &mut runs[token.run];
            let Some(page) = run.index(token.ordinal) else { continue };
            let to = (page, token.lane);
            run.kept.copy(version..version + 1, ring.states(), (tile, token.position % PAGE), to);
        }
    }
}

/// The masses of the given lanes, 0 in the others.
fn of_lanes(mass: &[f32; LANES], lanes: u32) -> [f32; LANES] {
    std::array::from_fn(|lane| if lanes >> lane & 1 != 0 { mass[lane] } else { 0.0 })
}

/// Moves the masses of tokens from the ring to their pages.
fn follow(weighed: &mut PageWeights, cut: usize, moved: &[FiledToken]) {
    if moved.is_empty() {
        return;
    }
    let mut index = weighed.index();
    for token in moved {
        let ring = PageId { place: Place::Ring, ordinal: token.position / PAGE };
        let page = PageId { place: run_place(token.run), ordinal: token.ordinal };
        let (from, to) = ((ring, (token.position % PAGE) as usize), (page, token.lane as usize));
        weighed.carry(&mut index, cut, from, to);
    }
}
