//! Who computes a call of attention: the lanes of the CPU, a device, or ranks beside the CPU.

use crate::attend::Read;
use crate::attend::feedback::{Feed, Of};
use crate::attend::forest::Forest;
use crate::attend::job::{Item, Job};
use crate::attend::lists::Cut;
use crate::attend::mass::Wanted;
use crate::base::device_slice::{DeviceOutput, DeviceSlice};
use crate::base::error::Error;
use crate::base::parallel::{Shared, each_mut};
use crate::config::HeadCodecs;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use pikv_lanes::attend::PACKED_ROWS;
use std::borrow::Cow;
use std::fmt::Debug;

/// Computes the partial results of a call, and joins them.
pub(crate) trait Executor: Debug + Send + Sync {
    /// Rows of a bundle at most.
    fn most(&self, job: &Job<'_>, forest: &Forest<'_>) -> usize;

    /// Attends the forests of a job whose queries the host has. With `wanted`, of each view, the masses of the forests' pages go to
    /// `results.seen`.
    ///
    /// # Errors
    /// A device or a rank that fails. Results are then undefined.
    fn run(
        &self,
        job: &mut Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[Wanted]>,
        results: Results<'_>,
        cut: &mut Cut,
    ) -> Result<(), Error>;

    /// What a step needs whose tensors lie on the executor's device; `None` of an executor without one.
    ///
    /// # Errors
    /// No memory on the device.
    fn session(&self, _layers: usize) -> Result<Option<Box<dyn Session>>, Error> {
        Ok(None)
    }
}

/// Where results go, in memory of the host.
pub(crate) struct Results<'a> {
    /// `[rows][query_heads][v_dim]`
    pub out: &'a mut [f32],
    /// `[rows][query_heads]`
    pub lse: &'a mut [f32],
    /// Of each forest, where something is wanted of it.
    pub seen: &'a mut [Feed],
}

/// Queries of a job that lie on a device.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
pub(crate) struct OnDevice {
    /// `[rows][query_heads][k_dim]`
    pub q: DeviceSlice,
    /// Where one that is not finite is noted.
    pub fault: u64,
}

/// Of whom a policy wants to know what attention saw.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
pub(crate) struct Asked {
    pub sequences: Vec<Of>,
    /// What rows read; unless it is all they were attended one by one.
    pub read: Read,
    /// Whether queries are wanted too.
    pub queries: bool,
}

/// What the host is told of a step whose tensors lie on a device, once it waits.
pub(crate) trait Session: Debug + Send + Sync {
    /// Whether kernels can read and write there, as far as the driver knows.
    ///
    /// # Errors
    /// Why not.
    fn check(&self, what: &'static str, slice: DeviceSlice) -> Result<(), Error>;

    /// As [`Session::check`], of log-sum-exps.
    ///
    /// # Errors
    /// As there.
    fn check_lse(&self, slice: DeviceSlice) -> Result<(), Error>;

    /// Where a fault is noted: of k and the words after it (0), or of q and the word after it (2).
    fn fault(&self, layer: usize, cause: usize) -> u64;

    /// Starts to bring keys and values down, for a policy that looks at them.
    ///
    /// # Errors
    /// The device.
    fn bring_tokens(&mut self, layer: usize, of: [DeviceSlice; 2]) -> Result<(), Error>;

    /// Attends the forests of a job whose queries lie on the device. Nothing is waited for: what policies want is on its way down. `seen`
    /// are the lists of each forest if something is wanted of it, and none else.
    ///
    /// # Errors
    /// The device, or no memory there.
    fn attend(
        &mut self,
        job: &Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[Wanted]>,
        output: DeviceOutput,
        seen: &mut Vec<Feed>,
        asked: Asked,
    ) -> Result<(), Error>;

    /// Forgets what attention saw of a layer: a later call counts.
    fn forget(&mut self, layer: usize);

    /// Whether a policy wants to know something.
    fn owes(&self) -> bool;

    /// Waits for all that was asked for, and says what was wrong first: by layers, of each k, v, q, scores, then outputs.
    ///
    /// # Errors
    /// What was wrong, or the device.
    fn judge(&self, shapes: &[LayerShape], codecs: &[HeadCodecs]) -> Result<(), Error>;

    /// Keys and values of a layer, if a policy wants them; they were waited for.
    fn tokens(&self, layer: usize) -> Option<[Cow<'_, [f32]>; 2]>;

    /// What rows of a layer read.
    fn read(&self, layer: usize) -> Read;

    /// What a layer's policy is told, if attention was given tensors of the device last; it was waited for.
    fn feeds(&mut self, layer: usize, shape: &LayerShape) -> Option<Vec<Feed>>;
}

/// Partial results of blocks that were worked out elsewhere.
pub(crate) trait Elsewhere: Send + Sync {
    /// The partial result of a block, and the weights behind it, if it was worked out.
    fn place(
        &self,
        item: &Item<'_>,
        block: usize,
        part: &mut [f32],
        raw: Option<&mut [[f32; LANES]]>,
    ) -> bool;
}

/// The lanes of the CPU.
#[derive(Debug)]
pub(crate) struct Cpu;

impl Executor for Cpu {
    fn most(&self, job: &Job<'_>, forest: &Forest<'_>) -> usize {
        let rows = job.inner.config.lanes.rows();
        if forest.has_packed() { rows.min(PACKED_ROWS) } else { rows }
    }

    fn run(
        &self,
        job: &mut Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[Wanted]>,
        results: Results<'_>,
        cut: &mut Cut,
    ) -> Result<(), Error> {
        let Results { out, lse, seen } = results;
        let (out, lse) = (Shared::new(out), Shared::new(lse));
        match wanted {
            Some(wanted) => each_mut(seen, |i, feed| {
                let forest = &forests[i];
                job.with_mass(forest, &wanted[forest.view], &out, &lse, &mut feed.weighed);
            }),
            None => job.run(forests, cut, &out, &lse),
        }
        Ok(())
    }
}
