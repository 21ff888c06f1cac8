//! Who computes a call of attention: the lanes of the CPU, a device, or ranks beside the CPU.

use crate::attend::feedback::{Feed, Of};
use crate::attend::forest::{Forest, Task};
use crate::attend::job::{Item, Job, OnDevice, Widest};
use crate::attend::mass::Wanted;
use crate::attend::options::Output;
use crate::attend::options::Read;
use crate::attend::view::View;
use crate::base::device_slice::{DeviceOutput, DeviceSlice};
use crate::base::error::{Error, length};
use crate::base::host_slice::{HostSlice, HostSliceMut};
use crate::config::HeadCodecs;
use pikv_core::plan::LayerShape;
use std::borrow::Cow;
use std::fmt::Debug;

/// Queries, and where results go.
pub(crate) enum Tensors<'a> {
    Host(HostSlice<'a>, Output<'a>),
    /// On the device of a session.
    Device {
        q: DeviceSlice,
        output: DeviceOutput,
        session: &'a mut dyn Session,
    },
}

impl<'a> Tensors<'a> {
    /// The queries that the host has.
    ///
    /// # Errors
    /// Tensors of another length than `rows` rows of the layer take, or a query of the views' rows that is not finite.
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

    /// The queries, if a device has them.
    pub fn on_device(&self, layer: usize) -> Option<OnDevice> {
        match self {
            Tensors::Host(..) => None,
            Tensors::Device { q, session, .. } => Some(OnDevice { q: *q, fault: session.fault(layer, 2) }),
        }
    }
}

/// Computes the partial results of a call, and joins them.
pub(crate) trait Executor: Debug + Send + Sync {
    /// How wide bundles of rows are.
    fn widest(&self) -> Widest;

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

    /// The session of a step whose tensors lie on the executor's device; `None` of an executor without one.
    ///
    /// # Errors
    /// No memory on the device.
    fn session(&self, _layers: usize) -> Result<Option<Box<dyn Session>>, Error> {
        Ok(None)
    }
}

/// Lists of a call cut into tasks, kept from call to call.
#[derive(Default)]
pub struct Cut {
    pub items: Vec<Item<'static>>,
    pub tasks: Vec<Task>,
    pub roots: Vec<u32>,
    pub offsets: Vec<usize>,
    pub parts: Vec<f32>,
}

/// Where results go, in memory of the host.
pub(crate) struct Results<'a> {
    /// `[rows][query_heads][v_dim]`
    pub out: HostSliceMut<'a>,
    /// `[rows][query_heads]`
    pub lse: &'a mut [f32],
    /// Of each forest, where something is wanted of it.
    pub seen: &'a mut [Feed],
}

/// Of whom a policy wants to know what attention saw.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
pub(crate) struct Asked {
    pub sequences: Vec<Of>,
    /// Whether queries are wanted too.
    pub queries: bool,
}

/// A step whose tensors lie on a device: its calls, and their results that the host reads once it waits.
pub(crate) trait Session: Debug + Send + Sync {
    /// Whether kernels can read and write there, as far as the driver knows.
    ///
    /// # Errors
    /// Why not.
    fn check(&self, what: &'static str, slice: DeviceSlice) -> Result<(), Error>;

    /// Whether kernels can write log-sum-exps there, as far as the driver knows.
    ///
    /// # Errors
    /// Why not.
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

    /// The pages that rows of a sequence read in a layer.
    fn read(&self, layer: usize, sequence: usize) -> Read;

    /// The feeds of a layer, if attention was last given tensors of the device. Waits for the device.
    fn feeds(&mut self, layer: usize, shape: &LayerShape) -> Option<Vec<Feed>>;
}
