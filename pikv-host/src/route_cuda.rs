//! Routing on a CUDA device: the device's copy of each layer's router state, and the choices of a step on their way to the host.
//!
//! The host's router has the authoritative state: it learns from the choices once they are on the host, by the same functions of the core.
//! Before each use the host compares its state with the state that the copy should have. They differ after a restore, a rollback or a step
//! routed by the host; the copy is then written anew.

use crate::base::device_slice::{DeviceExperts, DeviceRoutes, DeviceSlice};
use crate::base::error::{CudaError, Error};
use crate::device::Device;
use crate::device::driver::arguments;
use crate::device::kernels::Kernel;
use crate::device::memory::Memory;
use crate::device::pinned_copies::PinnedCopy;
use crate::device::ring::Upload;
use crate::router::on_device::{Averages, DeviceChoice, DevicePlan};
use crate::router::{Misses, Shape};
use pikv_core::page::{PAGE, Position};
use pikv_core::score;
use pikv_core::warp::LANES;
use pikv_kernels::args::{LearnArg, RouteArg};
use std::fmt;
use std::sync::Arc;

/// Bytes of the word that records a fault, at the start of the state.
const FAULT: u64 = 8;
/// No fault.
const NONE: u64 = u64::MAX;

/// Offsets of the lists of a state, in words behind the fault. Counts are 64 bits wide, and so come first.
#[derive(Clone, Copy, Debug)]
struct Places {
    experts: usize,
    fixed: usize,
    load: usize,
    miss: usize,
    entropy: usize,
    next: usize,
    /// End of the words that the host writes. The entropies after the rows that no rollback reaches follow here.
    firm: usize,
    all: usize,
}

impl Places {
    fn of(experts: usize) -> Places {
        let fixed = 2 * experts;
        let load = fixed + score::rows(experts) * LANES;
        let [miss, entropy, next, firm, all] = [1, 2, 3, 4, 5].map(|n| load + n * experts);
        Places { experts, fixed, load, miss, entropy, next, firm, all }
    }

    /// Writes a router's averages as words of the state.
    fn fill(&self, of: &Averages<'_>, words: &mut Vec<u32>) {
        words.clear();
        words.resize(self.firm, 0);
        let mut put = |at: usize, list: &[u32]| words[at..at + list.len()].copy_from_slice(list);
        put(0, bytemuck::cast_slice(of.counts));
        put(self.fixed, bytemuck::cast_slice(of.fixed));
        for (at, list) in [
            (self.load, of.load),
            (self.miss, of.miss),
            (self.entropy, of.entropy),
            (self.next, of.entropy_next),
        ] {
            put(at, bytemuck::cast_slice(list));
        }
    }
}

/// The rows of a step.
pub(crate) struct Batch<'a> {
    pub logits: DeviceSlice,
    /// First position and number of rows of each sequence.
    pub parts: &'a [(Position, usize)],
    /// Number of leading rows that no rollback reaches; 0 for several sequences.
    pub firm: usize,
    /// Whether the host needs the logits of the rows after `firm`.
    pub bring_logits: bool,
}

impl Batch<'_> {
    fn rows(&self) -> usize {
        self.parts.iter().map(|(_, rows)| rows).sum()
    }
}

/// Loads the kernels that choose among these numbers of experts, one for each router, and that learn.
///
/// # Errors
/// [`CudaError::Module`].
pub(crate) fn load(device: &Device, experts: impl Iterator<Item = u32>) -> Result<(), CudaError> {
    let of = |experts| {
        [Kernel::route(score::rows(experts as usize)), Kernel::FoldEntropies, Kernel::LearnRouter]
            .map(Kernel::module)
    };
    device.load(experts.flat_map(of))
}

/// Choices on their way to the host.
#[derive(Debug)]
pub(crate) struct PendingChoices {
    down: PinnedCopy,
    pub firm: usize,
    /// Number of experts whose pages are fetched.
    pub fetch: usize,
    choices: usize,
    /// Number of experts if entropies are kept, else 0.
    entropies: usize,
}

/// Choices on the host.
pub(crate) struct Brought<'a> {
    /// Index and value of the first logit that is not finite.
    pub fault: Option<(usize, f32)>,
    /// `[rows][top_k]`
    pub chosen: &'a [u32],
    /// Averages of the gate's entropy after the first `firm` rows, if there are any.
    pub firm_entropy: &'a [f32],
    /// Averages of the gate's entropy after all rows.
    pub entropy: &'a [f32],
    /// Logits of the rows after `firm`, if they were asked for.
    pub logits: &'a [f32],
}

impl PendingChoices {
    /// Waits for the copy.
    ///
    /// # Errors
    /// A failed device.
    pub fn wait(&self) -> Result<Brought<'_>, Error> {
        self.down.done.wait()?;
        let (fault, rest) = self.down.words().split_at(2);
        let (chosen, rest) = rest.split_at(self.choices);
        let (entropy, rest) = rest.split_at(self.entropies);
        let (firm_entropy, logits) = rest.split_at(if self.firm > 0 { self.entropies } else { 0 });
        let fault = u64::from(fault[0]) | u64::from(fault[1]) << 32;
        Ok(Brought {
            fault: (fault != NONE).then_some(((fault >> 32) as usize, f32::from_bits(fault as u32))),
            chosen,
            firm_entropy: bytemuck::cast_slice(firm_entropy),
            entropy: bytemuck::cast_slice(entropy),
            logits: bytemuck::cast_slice(logits),
        })
    }
}

/// A layer's router on a device.
pub(crate) struct DeviceRouter {
    places: Places,
    state: Memory,
    /// Choices, weights and entropies of a step's rows.
    rows: Memory,
    /// Content of `state`, valid if `known`.
    held: Vec<u32>,
    known: bool,
    pending: Option<PendingChoices>,
    words: Vec<u32>,
    device: Arc<Device>,
}

impl fmt::Debug for DeviceRouter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnDevice").field("known", &self.known).finish_non_exhaustive()
    }
}

impl DeviceRouter {
    /// For a router of `experts` experts.
    ///
    /// # Errors
    /// No memory on the device.
    pub fn new(device: &Arc<Device>, experts: u32) -> Result<DeviceRouter, Error> {
        device.enter()?;
        let places = Places::of(experts as usize);
        let state = Memory::new(FAULT + 4 * places.all as u64)?;
        let (held, words) = (Vec::new(), Vec::new());
        let (rows, device) = (Memory::default(), device.clone());
        Ok(DeviceRouter { places, state, rows, held, known: false, pending: None, words, device })
    }

    /// Whether choices are on their way to the host.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Waits for choices on their way to the host.
    ///
    /// # Errors
    /// A failed device.
    pub fn wait(&self) -> Result<(), Error> {
        Ok(self.pending.as_ref().map_or(Ok(()), |pending| pending.down.done.wait())?)
    }

    /// Takes the choices on their way to the host; the caller [puts them back](OnDevice::put_back).
    pub fn take(&mut self) -> Option<PendingChoices> {
        self.pending.take()
    }

    pub fn put_back(&self, pending: PendingChoices) {
        self.device.downs.put_back(pending.down);
    }

    /// Drops the choices of a step that is not committed.
    pub fn forget(&mut self) {
        if let Some(pending) = self.pending.take() {
            self.put_back(pending);
            self.known = false;
        }
    }

    /// Address of a list of the state.
    fn at(&self, place: usize) -> u64 {
        self.state.address() + FAULT + 4 * place as u64
    }

    /// Address of a list of the state, or 0 if the list is empty.
    fn kept(&self, place: usize, list: &[f32]) -> u64 {
        if list.is_empty() { 0 } else { self.at(place) }
    }

    /// Launches the choice of experts for rows, and the copy of the choices to the host. Waits only if there are more rows than ever
    /// before.
    ///
    /// # Errors
    /// Logits that are not f32 on this device; a failed device.
    pub fn route(
        &mut self,
        plan: &DevicePlan<'_>,
        shape: &Shape,
        batch: &Batch<'_>,
    ) -> Result<DeviceRoutes, Error> {
        self.device.check_logits(batch.logits)?;
        self.forget();
        let device = self.device.clone();
        let mut work = device.work()?;
        let (rows, top_k, averages) = (batch.rows(), shape.top_k as usize, &plan.averages);
        let choices = rows * top_k;
        let entropies = if averages.entropy.is_empty() { 0 } else { self.places.experts };
        let floats = if plan.same { 2 * choices } else { 4 * choices };
        let bytes = 4 * (floats + rows * entropies) as u64;
        let first = self.rows.reserve(bytes, &device.stream)?;
        self.places.fill(averages, &mut self.words);
        if !self.known || self.held != self.words {
            self.known = false;
            work.write(&device.stream, &[(self.at(0), &self.words)])?;
            std::mem::swap(&mut self.held, &mut self.words);
        }
        self.known = !averages.learn();
        let list = |n: usize| first + 4 * (n * choices) as u64;
        let filing = DeviceExperts { experts: list(0), weights: list(1) };
        let model = if plan.same { filing } else { DeviceExperts { experts: list(2), weights: list(3) } };
        let mut of = self.arguments(plan, shape, batch, [filing, model]);
        of.entropies = if entropies > 0 { first + 4 * floats as u64 } else { 0 };
        if of.start != RouteArg::RANKED {
            let words = &mut self.words;
            words.clear();
            words.extend(batch.parts.iter().flat_map(|(at, rows)| at.0..at.0 + *rows as u32));
            let mut upload = Upload::new();
            upload.add(words);
            of.positions = work.send(&device.stream, &upload)?;
        }
        device.fill(of.fault, u32::MAX, 2)?;
        let kernel = Kernel::route(score::rows(self.places.experts));
        let warps = if plan.same { rows } else { 2 * rows };
        // SAFETY: the argument has the kernel's type, and its lists have the lengths that it gives: the caller's tensor is valid and long
        // enough for the rows, which the caller checked; the other lists were reserved above.
        unsafe { device.launch(kernel, warps, arguments!(of))? };
        if entropies > 0 {
            self.fold(averages.keep_entropy, of.entropies, (rows, batch.firm))?;
        }
        let down = self.bring(filing.experts, choices, entropies, batch)?;
        let fetch = plan.fetch as usize;
        self.pending = Some(PendingChoices { down, firm: batch.firm, fetch, choices, entropies });
        Ok(DeviceRoutes { model, filing, rows, top_k })
    }

    fn arguments(
        &self,
        plan: &DevicePlan<'_>,
        shape: &Shape,
        batch: &Batch<'_>,
        [filing, model]: [DeviceExperts; 2],
    ) -> RouteArg {
        let [model, model_weights] = if plan.same { [0; 2] } else { [model.experts, model.weights] };
        let mut of = RouteArg {
            logits: batch.logits.address(),
            fixed: 0,
            chosen: filing.experts,
            weights: filing.weights,
            model,
            model_weights,
            counts: if plan.averages.counts.is_empty() { 0 } else { self.at(0) },
            entropies: 0,
            fault: self.state.address(),
            positions: 0,
            rows: batch.rows() as u32,
            experts: shape.experts,
            top_k: shape.top_k,
            cap: 0.0,
            groups: 0,
            kept: 0,
            best: 0,
            start: RouteArg::RANKED,
            stride: 0,
            pad: 0,
        };
        match plan.choice {
            DeviceChoice::HeadRanking { biased, cap, groups } => {
                of.fixed = if biased { self.at(self.places.fixed) } else { 0 };
                of.cap = cap.unwrap_or(0.0);
                if let Some(groups) = groups {
                    (of.groups, of.kept, of.best) = (groups.count, groups.kept, groups.best);
                }
            }
            DeviceChoice::Placed { hashed, stride } => {
                (of.start, of.stride) = (if hashed { RouteArg::HASHED } else { RouteArg::ROBIN }, stride);
            }
        }
        of
    }

    /// Folds the gate's entropies into the averages: of the first `firm` rows, then of the others.
    fn fold(&self, keep: f32, entropies: u64, (rows, firm): (usize, usize)) -> Result<(), Error> {
        let (experts, next) = (self.places.experts as u32, self.at(self.places.next));
        let between = self.at(self.places.firm);
        let runs = if firm > 0 {
            [(0, firm, next, between), (firm, rows - firm, between, next)]
        } else {
            [(0, 0, next, next), (0, rows, next, next)]
        };
        for (first, rows, from, to) in runs.into_iter().filter(|(_, rows, ..)| *rows > 0) {
            let (at, rows) = (entropies + 4 * (first * self.places.experts) as u64, rows as u32);
            let arguments = arguments!(at, rows, experts, keep, from, to);
            let warps = score::rows(self.places.experts);
            // SAFETY: the arguments have the kernel's types, and the lists have the lengths that they give.
            unsafe { self.device.launch(Kernel::FoldEntropies, warps, arguments)? };
        }
        Ok(())
    }

    fn bring(
        &self,
        chosen: u64,
        choices: usize,
        entropies: usize,
        batch: &Batch<'_>,
    ) -> Result<PinnedCopy, Error> {
        let skipped = batch.firm * self.places.experts;
        let logits = if batch.bring_logits { batch.logits.bytes() - 4 * skipped } else { 0 };
        let places = [
            (self.state.address(), FAULT as usize),
            (chosen, 4 * choices),
            (self.at(self.places.next), 4 * entropies),
            (self.at(self.places.firm), if batch.firm > 0 { 4 * entropies } else { 0 }),
            (batch.logits.address() + 4 * skipped as u64, logits),
        ];
        self.device.downs.bring(&self.device.stream, &places)
    }

    /// Launches the update of the device's state after a step that the host's router has just learnt from: by the choices on the device, and
    /// by the pages of each expert that the step `wanted` and `missed`. `plan` has the host's averages.
    ///
    /// # Errors
    /// A failed device; the state is then written anew before its next use.
    pub fn learn(&mut self, plan: &DevicePlan<'_>, wanted: &[u32], missed: &[u32]) -> Result<(), Error> {
        let averages = &plan.averages;
        if !averages.learn() {
            return Ok(());
        }
        self.known = false;
        let device = self.device.clone();
        let mut work = device.work()?;
        let mut upload = Upload::new();
        let (mut wanted_at, mut missed_at) = (0, 0);
        if !averages.miss.is_empty() {
            let [wanted, missed] = [wanted, missed].map(|list| upload.add(list));
            let first = work.send(&device.stream, &upload)?;
            (wanted_at, missed_at) = (first + wanted, first + missed);
        }
        let (measure, keep_miss) = averages.keep_miss;
        let places = &self.places;
        let of = LearnArg {
            fixed: self.at(places.fixed),
            counts: if averages.counts.is_empty() { 0 } else { self.at(0) },
            load: self.kept(places.load, averages.load),
            miss: self.kept(places.miss, averages.miss),
            entropy: self.kept(places.entropy, averages.entropy),
            next: self.kept(places.next, averages.entropy),
            wanted: wanted_at,
            missed: missed_at,
            experts: places.experts as u32,
            of_page: PAGE,
            count_misses: u32::from(measure == Misses::Count),
            keep_load: averages.keep_load,
            keep_miss,
            alpha: averages.coefficients.alpha,
            lambda: averages.coefficients.lambda,
            beta: averages.coefficients.beta,
        };
        // SAFETY: the argument has the kernel's type; its lists lie in the state and in the upload, which was sent before.
        unsafe { device.launch(Kernel::LearnRouter, 1, arguments!(of))? };
        places.fill(averages, &mut self.held);
        self.known = true;
        Ok(())
    }
}

impl Drop for DeviceRouter {
    fn drop(&mut self) {
        self.forget();
        // `state` and `rows` are freed next, so no kernel may still use them; a lost device has nothing to free.
        let _ = self.device.enter();
        let _ = self.device.stream.synchronize();
    }
}
