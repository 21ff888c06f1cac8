//! The trait of implementations of attention: the lanes of the CPU, a device, or the CPU with other ranks.

use crate::attend::feedback::{HeadFeedback, Of};
use crate::attend::forest::{Forest, Task};
use crate::attend::job::{DeviceQueries, Item, Job, Widest};
use crate::attend::mass::WeightSets;
use crate::attend::options::AttendOutput;
use crate::attend::options::ReadPages;
use crate::attend::view::View;
use crate::base::device_slice::{DeviceOutput, DeviceSlice};
use crate::base::error::{Error, length};
use crate::base::host_slice::{HostSlice, HostSliceMut};
use crate::config::HeadCodecs;
use pikv_core::plan::LayerShape;
use std::borrow::Cow;
use std::fmt::Debug;

/// Queries and outputs.
pub(crate) enum Tensors<'a> {
    Host(HostSlice<'a>, AttendOutput<'a>),
    /// On the device of a session.
    Device {
        q: DeviceSlice,
        output: DeviceOutput,
        session: &'a mut dyn Session,
    },
}

impl<'a> Tensors<'a> {
    /// Checks the tensors; returns the queries if they are on the host.
    ///
    /// # Errors
    /// [`Error::Length`] if a tensor does not have the length of `rows` rows; [`Error::Query`] for a query of the views' rows that is
    /// not finite.
    pub fn check(
        &self,
        layer: usize,
        shape: &LayerShape,
        rows: usize,
        views: &[View<'_>],
    ) -> Result<HostSlice<'a>, Error> {
        let heads = shape.query_heads as usize;
        let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
        let (q_len, out_len, lse_len) = match self {
            Tensors::Host(q, to) => (q.len(), to.out.len(), to.lse.as_ref().map(|lse| lse.len())),
            Tensors::Device { q, output: to, .. } => (q.len(), to.out.len(), to.lse.map(|lse| lse.len())),
        };
        length("q", q_len, rows * heads * k_dim, "rows * query_heads * k_dim")?;
        length("out", out_len, rows * heads * v_dim, "rows * query_heads * v_dim")?;
        if let Some(lse_len) = lse_len {
            length("lse", lse_len, rows * heads, "rows * query_heads")?;
        }
        let Tensors::Host(q, _) = *self else { return Ok(HostSlice::F32(&[])) };
        let width = heads * k_dim;
        let wild = |view: &View<'_>| {
            let from = view.start * width;
            let (i, value) = q.part(from, view.rows as usize * width).wild()?;
            Some((from + i, value))
        };
        if let Some((at, value)) = views.iter().find_map(wild) {
            let (row, head, channel) = (at / width, at / k_dim % heads, at % k_dim);
            return Err(Error::Query { layer, row, head, channel, value });
        }
        Ok(q)
    }

    /// The queries, if they are on a device.
    pub fn on_device(&self, layer: usize) -> Option<DeviceQueries> {
        match self {
            Tensors::Host(..) => None,
            Tensors::Device { q, session, .. } => {
                Some(DeviceQueries { q: *q, fault: session.fault(layer, 2) })
            }
        }
    }
}

/// Computes the partial results of a call and joins them.
pub(crate) trait Executor: Debug + Send + Sync {
    /// Whether it can compute with [`Attend::fast`](crate::Attend::fast).
    fn rounds(&self) -> bool {
        false
    }

    /// Most rows of a bundle.
    fn widest(&self) -> Widest;

    /// Attention of the forests of a job with queries on the host. `wanted` has, for each view, the rows whose weights are added to
    /// `results.seen`.
    ///
    /// # Errors
    /// A failed device or rank; results are then undefined.
    fn run(
        &self,
        job: &mut Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[WeightSets]>,
        results: Results<'_>,
        cut: &mut TaskLists,
    ) -> Result<(), Error>;

    /// A session for a step with tensors on the executor's device; `None` for an executor without one.
    ///
    /// # Errors
    /// No memory on the device.
    fn session(&self, _layers: usize) -> Result<Option<Box<dyn Session>>, Error> {
        Ok(None)
    }
}

/// Tasks of a call; the lists are kept between calls.
#[derive(Default)]
pub struct TaskLists {
    pub items: Vec<Item<'static>>,
    pub tasks: Vec<Task>,
    pub roots: Vec<u32>,
    pub offsets: Vec<usize>,
    pub parts: Vec<f32>,
}

/// Outputs in host memory.
pub(crate) struct Results<'a> {
    /// `[rows][query_heads][v_dim]`
    pub out: HostSliceMut<'a>,
    /// `[rows][query_heads]`
    pub lse: &'a mut [f32],
    /// For each forest, if weights or hits are computed.
    pub seen: &'a mut [HeadFeedback],
}

/// Sequences whose weights or hits are computed.
pub(crate) struct Asked {
    pub sequences: Vec<Of>,
    /// Whether queries are needed too.
    pub queries: bool,
}

/// A step with tensors on a device: its calls, and their results, which the host reads after a wait.
pub(crate) trait Session: Debug + Send + Sync {
    /// Checks that kernels can read and write a tensor, as far as the driver knows.
    ///
    /// # Errors
    /// [`Error::DeviceTensor`] with the reason.
    fn check(&self, what: &'static str, slice: DeviceSlice) -> Result<(), Error>;

    /// Checks that kernels can write log-sum-exps to a tensor, as far as the driver knows.
    ///
    /// # Errors
    /// [`Error::DeviceTensor`] with the reason.
    fn check_lse(&self, slice: DeviceSlice) -> Result<(), Error>;

    /// Address of the word that records faults of `cause`, 0 to 4: k, v, q, scores, outputs. The words of a layer are adjacent.
    fn fault(&self, layer: usize, cause: usize) -> u64;

    /// Starts the copy of keys and values to the host, for a policy that reads them.
    ///
    /// # Errors
    /// A failed device.
    fn bring_tokens(&mut self, layer: usize, of: [DeviceSlice; 2]) -> Result<(), Error>;

    /// Launches attention of the forests of a job with queries on the device, and the copy of its feeds to the host. Does not wait. `seen`
    /// has a feed for each forest if weights or hits are computed, and is empty otherwise.
    ///
    /// # Errors
    /// A failed device, or no memory there.
    fn attend(
        &mut self,
        job: &Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[WeightSets]>,
        output: DeviceOutput,
        seen: &mut Vec<HeadFeedback>,
        asked: Asked,
    ) -> Result<(), Error>;

    /// Drops the feeds of a layer, because a later call replaces them.
    fn forget(&mut self, layer: usize);

    /// Whether results for a policy are pending.
    fn owes(&self) -> bool;

    /// Waits for all pending work, and returns the first fault: by layers, and in each of k, v, q, scores, then outputs.
    ///
    /// # Errors
    /// The first fault, such as [`Error::Unstorable`] or [`Error::ScoreOverflow`]; a failed device.
    fn judge(&self, shapes: &[LayerShape], codecs: &[HeadCodecs]) -> Result<(), Error>;

    /// Keys and values of a layer, if a policy needs them. Call after a wait.
    fn tokens(&self, layer: usize) -> Option<[Cow<'_, [f32]>; 2]>;

    /// Pages that rows of a sequence read in a layer.
    fn read(&self, layer: usize, sequence: usize) -> ReadPages;

    /// Feeds of a layer, if its last attention had tensors on the device. Waits for the device.
    fn feeds(&mut self, layer: usize, shape: &LayerShape) -> Option<Vec<HeadFeedback>>;
}
