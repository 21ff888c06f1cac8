//! Steps with tensors on the device.

use crate::attend::executor::Session;
use crate::attend::executor::Tensors;
use crate::attend::hits::{Asking, Fetched};
use crate::attend::options::Attend;
use crate::attend::options::ReadPages;
use crate::base::chunks::Common;
use crate::base::device_slice::{DeviceOutput, DeviceSlice};
use crate::base::error::Error;
use crate::base::frequencies::Frequencies;
use crate::base::host_slice::HostSlice;
use crate::cache::step::Step;
use crate::memory::writes::Tokens;
use crate::policy::Token;
use crate::policy::rule::Rule;
use pikv_core::page::{PAGE, Position};
use smallvec::SmallVec;

/// Tensors on the device: for each layer [`append_device`](Step::append_device) and [`attend_device`](Step::attend_device), in a cache on a
/// CUDA back end. All work is enqueued on the back end's stream, in the order of the calls. The host does not wait, and a step no larger
/// than earlier ones allocates nothing, except a chunk of pages when all are in use. Results have the bits of the host calls, which may be
/// mixed into the same step.
///
/// Tensors are in f32, f16 or bf16, each in its own dtype ([`DeviceSlice::new`]). Inputs are widened to f32, which is exact; keys and
/// values go unchanged to pages of the same dtype. Results are rounded to nearest even when they are written.
///
/// Some errors that the host calls return at once are found later: values and queries that are not finite, values that the dtype or the
/// codec cannot hold, scores that overflow. Results of such rows, and of rows that read such tokens, are undefined. The same holds for
/// results that the dtype of the output cannot hold (in f16 from 65,520 on); infinities are written for them. [`check`](Step::check) waits
/// for the device and returns the first such error. So does [`commit`](Step::commit), once a step, if a policy needs attention weights,
/// keys or values. Without such a policy a commit neither waits nor checks: an unchecked step is committed with its errors.
///
/// The host also waits
///
/// * at commit, where a policy reads pages to rank tokens;
/// * to pack pages with codecs that run on the host: means, block PCA, and the second codec of
///   [`CacheConfig::age`](crate::CacheConfig::age);
/// * while pages of [tiers](crate::tiers) are read from files, or many are on their way up;
/// * if lists are uploaded faster than the device takes them: there is room for 64 of the largest size so far, from 64 KiB to 64 MiB.
///
/// The stream gets copies, fills, launches and events with this step's own lists; pages, positions and their numbers differ from step to
/// step. So a CUDA graph captured of one step cannot replay another; capture the model's work between these calls instead.
impl Step<'_> {
    /// [`append`](Step::append) of keys and values on the device, each in its own dtype.
    ///
    /// # Errors
    /// The errors of `append` except those about values; [`Error::DeviceTensor`] for an address that is null, not aligned, unknown to the
    /// driver, or of another device; [`Error::HostTensors`] for a cache on the CPU, or with [`key_bounds`](crate::CacheConfig::key_bounds), which
    /// the host computes from the keys. The layer may then be appended again; invalid values noted by the device stay noted.
    pub fn append_device(&mut self, layer: usize, k: DeviceSlice, v: DeviceSlice) -> Result<(), Error> {
        self.appendable(layer, k.len(), v.len())?;
        if self.inner.shape.config.key_bounds {
            return Err(Error::HostTensors { layer, what: "bounds of pages (CacheConfig::key_bounds)" });
        }
        let mut late = self.late(layer)?;
        let appended = self.append_in_place(layer, k, v, &mut *late);
        self.late = Some(late);
        appended
    }

    /// [`attend`](Step::attend) with queries on the device, `[rows][query_heads][k_dim]`, and results on the device.
    ///
    /// # Errors
    /// The errors of `attend` except those about queries and scores; [`Error::DeviceTensor`] as [`append_device`](Step::append_device),
    /// also for log-sum-exps that are not f32; [`Error::HostTensors`] for a cache on the CPU, or for rows that read by
    /// [`ReadPages::Quest`](crate::attend::options::ReadPages::Quest), as the host selects their pages. `out` is then undefined.
    pub fn attend_device(
        &mut self,
        layer: usize,
        q: DeviceSlice,
        options: &Attend,
        out: DeviceOutput,
    ) -> Result<(), Error> {
        self.inner.shape.layer(layer)?;
        if self.reads_of(options).any(|read| matches!(read, ReadPages::Quest { .. })) {
            return Err(Error::HostTensors { layer, what: "pages chosen by the queries (ReadPages::Quest)" });
        }
        let mut late = self.late(layer)?;
        let attended = self.attend_in_place(layer, q, options, out, &mut *late);
        self.late = Some(late);
        attended
    }

    /// Waits for the device to finish the step's work so far, and returns the first error in its tensors: by layer, and within a layer
    /// keys, values, queries, scores, outputs. Without tensors on the device it does nothing.
    ///
    /// # Errors
    /// [`Error::Unstorable`], [`Error::Query`], [`Error::ScoreOverflow`] or [`Error::Output`]: the step can then only be dropped.
    /// [`Error::Device`].
    pub fn check(&mut self) -> Result<(), Error> {
        if let Some(late) = &self.late {
            late.judge(&self.inner.shape.config.layers, &self.inner.shape.codecs)?;
        }
        Ok(())
    }
}

impl Step<'_> {
    /// Takes the deferred results out of the step, or starts a session.
    fn late(&mut self, layer: usize) -> Result<Box<dyn Session>, Error> {
        match self.late.take() {
            Some(late) => Ok(late),
            None => {
                let late = self.inner.executor.session(self.layers.len())?;
                late.ok_or(Error::HostTensors { layer, what: "a cache on the CPU" })
            }
        }
    }

    fn append_in_place(
        &mut self,
        layer: usize,
        k: DeviceSlice,
        v: DeviceSlice,
        late: &mut dyn Session,
    ) -> Result<(), Error> {
        late.check("k", k)?;
        late.check("v", v)?;
        let inner = self.inner.clone();
        let layout = inner.shape.layer(layer)?.layout;
        let reads = |rule: &Rule| rule.words > 0 && rule.reads_tokens;
        if inner.shape.rules[layer].as_deref().is_some_and(reads) {
            late.bring_tokens(layer, [k, v])?;
        }
        let limits = inner.shape.codecs[layer].iter().map(|codec| {
            let [k, v] =
                codec.as_ref().map_or([f32::MAX; 2], |codec| [codec.k_limits.each, codec.v_limits.each]);
            [k.min(layout.k.limit()), v.min(layout.v.limit())]
        });
        let limits: SmallVec<[[f32; 2]; 16]> = limits.collect();
        self.append_tokens(layer, &Tokens::Device { k, v, limits: &limits, faults: late.fault(layer, 0) })
    }

    fn attend_in_place(
        &mut self,
        layer: usize,
        q: DeviceSlice,
        options: &Attend,
        out: DeviceOutput,
        late: &mut dyn Session,
    ) -> Result<(), Error> {
        late.check("q", q)?;
        late.check("out", out.out)?;
        out.lse.map_or(Ok(()), |lse| late.check_lse(lse))?;
        self.attend_tensors(layer, options, Tensors::Device { q, output: out, session: late })
    }

    /// Waits for results that policies need, if any. Passes the tokens to the policies at once, and keeps the feedback of attention for
    /// `observe`.
    pub(super) fn take_late_results(&mut self) -> Result<(), Error> {
        let Some(late) = &mut self.late else { return Ok(()) };
        let shapes = &self.inner.shape.config.layers;
        if late.owes() {
            late.judge(shapes, &self.inner.shape.codecs)?;
        }
        for (layer, (shape, done)) in shapes.iter().zip(&mut self.layers).enumerate() {
            if let Some(tokens) = late.tokens(layer) {
                let (layout, heads) = (&shape.layout, shape.kv_heads as usize);
                let [k, v] = &tokens;
                let tokens = Tokens::Host { k: HostSlice::F32(k), v: HostSlice::F32(v) };
                for part in self.parts.iter_mut().filter(|part| !part.out) {
                    let state = Common::own(&mut part.sequence.layers[layer]);
                    for (row, position) in (part.row..).zip(part.sequence.len..part.len) {
                        let at = (position / PAGE - state.first_tile) as usize;
                        for (h, head) in state.heads.iter_mut().enumerate() {
                            let of = row * heads + h;
                            let Some((key, value)) = tokens.row(layout, of, &mut self.room) else { continue };
                            let position = Position(position);
                            let token = Token { layer, kv_head: h, position, key, value };
                            if let Some(rule) = state.rule.as_deref() {
                                rule.born(&token, head.ring.states_mut(), at);
                            }
                        }
                    }
                }
            }
            if let Some(mut feeds) = late.feeds(layer, shape) {
                feeds.retain(|feed| !self.parts[feed.sequence].out);
                if let Some(hits) = self.inner.pool.hits() {
                    let (first, (more, counts)) = (done.fetch, &done.more);
                    for feed in &mut feeds {
                        let (part, h) = (&self.parts[feed.sequence], feed.head);
                        let asking = Asking {
                            inner: &self.inner.shape,
                            hits,
                            shape,
                            stretch: self.inner.shape.frequencies[layer]
                                .as_ref()
                                .map_or(1.0, Frequencies::stretch),
                            layer: &part.sequence.layers[layer],
                            rows: part.sequence.len..part.len,
                            read: late.read(layer, feed.sequence),
                            fetched: Fetched { first, more, counts },
                        };
                        let width = shape.group() as usize * shape.layout.k_dim as usize;
                        let queries = |row: usize| HostSlice::F32(&feed.queries[row * width..][..width]);
                        feed.far = asking.meet(h, part.row, queries, &mut feed.met);
                    }
                }
                done.feeds = feeds;
            }
        }
        Ok(())
    }
}
