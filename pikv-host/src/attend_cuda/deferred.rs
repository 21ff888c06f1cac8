//! Deferred results of a step with device tensors: faults that kernels found, and attention weights for policies. Read back when the
//! host next waits.

use crate::attend::executor::{Asked, Session};
use crate::attend::feedback::together;
use crate::attend::feedback::{HeadFeedback, Of};
use crate::attend::forest::Forest;
use crate::attend::job::Job;
use crate::attend::mass::WeightSets;
use crate::attend::options::ReadPages;
use crate::attend_cuda::executor::attend_in_place;
use crate::base::device_slice::{DeviceOutput, DeviceSlice};
use crate::base::error::Error;
use crate::base::host_slice::HostSlice;
use crate::config::HeadCodecs;
use crate::device::Device;
use crate::device::memory::Memory;
use crate::device::pinned_copies::PinnedCopy;
use pikv_core::dtype::Dtype;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use std::borrow::Cow;
use std::fmt;
use std::mem;
use std::sync::{Arc, PoisonError};

/// Words of 64 bits for each layer, in which kernels record faults in k, v, q, scores and outputs. The upper half is the element's index.
const CAUSES: usize = 5;
/// No fault.
const NONE: u64 = u64::MAX;

/// The elements of a tensor as f32, and the words after it.
fn split(words: &[u32], of: DeviceSlice) -> (Cow<'_, [f32]>, &[u32]) {
    let (words, rest) = words.split_at(of.bytes().div_ceil(4));
    let floats = match of.dtype() {
        Dtype::F32 => Cow::Borrowed(bytemuck::cast_slice(words)),
        dtype => {
            let halves = &bytemuck::cast_slice::<_, u16>(words)[..of.len()];
            Cow::Owned(halves.iter().map(|bits| dtype.decode(u32::from(*bits))).collect())
        }
    };
    (floats, rest)
}

/// Attention weights of a layer, on their way to the host.
#[derive(Debug, Default)]
pub struct Readback {
    pub feeds: Vec<HeadFeedback>,
    /// For each feed, its first row of masses, and its pages that are listed in several forms; empty if no masses are wanted.
    pub masses: Vec<(usize, Vec<usize>)>,
    /// The queries, if they are wanted.
    pub q: Option<DeviceSlice>,
    /// The copy of the masses, then the queries, if either is wanted.
    pub down: Option<PinnedCopy>,
    /// Rows of masses.
    pub rows: usize,
}

#[derive(Debug, Default)]
struct DeferredLayer {
    /// Keys and values of all rows.
    tokens: Option<(PinnedCopy, [DeviceSlice; 2])>,
    readback: Option<Readback>,
    sequences: Vec<Of>,
    scale: f32,
    /// Name of the dtype of outputs.
    out: &'static str,
}

/// Deferred results of all layers.
pub(crate) struct Deferred {
    device: Arc<Device>,
    /// `[layers][CAUSES]`
    faults: Memory,
    layers: Vec<DeferredLayer>,
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late").field("layers", &self.layers).finish_non_exhaustive()
    }
}

impl Deferred {
    pub fn new(device: &Arc<Device>, layers: usize) -> Result<Deferred, Error> {
        device.enter()?;
        let bytes = (layers * CAUSES * 8) as u64;
        let known = {
            let mut faults = device.downs.faults.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = faults.iter().position(|memory| memory.bytes() >= bytes);
            fits.map(|i| faults.swap_remove(i))
        };
        let faults = known.map_or_else(|| Memory::new(bytes), Ok)?;
        device.fill(faults.address(), u32::MAX, (bytes / 4) as u32)?;
        let layers = (0..layers).map(|_| DeferredLayer::default()).collect();
        Ok(Deferred { device: device.clone(), faults, layers })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Address of the word that records faults of `cause`, 0 to 4: k, v, q, scores, outputs. The words of a layer are adjacent.
    pub fn fault(&self, layer: usize, cause: usize) -> u64 {
        self.faults.address() + (8 * (layer * CAUSES + cause)) as u64
    }

    fn error(
        &self,
        layer: usize,
        shape: &LayerShape,
        codecs: &HeadCodecs,
        cause: usize,
        fault: u64,
    ) -> Error {
        let (at, value) = ((fault >> 32) as usize, f32::from_bits(fault as u32));
        let (layout, heads) = (&shape.layout, shape.kv_heads as usize);
        let unstorable = |what, dim: u32, dtype: Dtype| {
            let kv_head = at / dim as usize % heads;
            let packed = codecs[kv_head].as_ref();
            let each = packed.map(|c| if what == "k" { c.k_limits.each } else { c.v_limits.each });
            // Kernels check the dtype's own limit first.
            let past = value.is_nan() || value.abs() > dtype.limit();
            let limit = each.filter(|_| !past).unwrap_or(dtype.largest());
            let (row, channel, dtype) = (at / (dim as usize * heads), at as u32 % dim, dtype.name());
            Error::Unstorable { what, layer, kv_head, row, channel, value, dtype, limit }
        };
        let heads = shape.query_heads as usize;
        // Row, query head and channel.
        let place = |dim: u32| (at / (heads * dim as usize), at / dim as usize % heads, at % dim as usize);
        let DeferredLayer { scale, out, .. } = self.layers[layer];
        match cause {
            0 => unstorable("k", layout.k_dim, layout.k),
            1 => unstorable("v", layout.v_dim, layout.v),
            2 => {
                let (row, head, channel) = place(layout.k_dim);
                Error::Query { layer, row, head, channel, value }
            }
            3 => Error::ScoreOverflow { layer, row: at / heads, head: at % heads, scale },
            _ => {
                let (row, head, channel) = place(layout.v_dim);
                Error::Output { layer, row, head, channel, value, dtype: out }
            }
        }
    }
}

impl Session for Deferred {
    fn check(&self, what: &'static str, slice: DeviceSlice) -> Result<(), Error> {
        self.device.check(what, slice)
    }

    fn check_lse(&self, slice: DeviceSlice) -> Result<(), Error> {
        self.device.check_lse(slice)
    }

    fn fault(&self, layer: usize, cause: usize) -> u64 {
        Deferred::fault(self, layer, cause)
    }

    fn attend(
        &mut self,
        job: &Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[WeightSets]>,
        output: DeviceOutput,
        seen: &mut Vec<HeadFeedback>,
        asked: Asked,
    ) -> Result<(), Error> {
        let readback = attend_in_place(job, forests, wanted, output, seen, asked.queries, self)?;
        // The last of several calls counts.
        self.forget(job.layer);
        let layer = &mut self.layers[job.layer];
        (layer.scale, layer.out, layer.readback) = (job.scale, output.out.dtype().name(), Some(readback));
        layer.sequences = asked.sequences;
        Ok(())
    }

    fn bring_tokens(&mut self, layer: usize, of: [DeviceSlice; 2]) -> Result<(), Error> {
        let _work = self.device.work()?;
        let places = of.map(|of| (of.address(), of.bytes()));
        let tokens = self.device.downs.bring(&self.device.stream, &places)?;
        if let Some((old, _)) = self.layers[layer].tokens.replace((tokens, of)) {
            self.device.downs.put_back(old);
        }
        Ok(())
    }

    fn forget(&mut self, layer: usize) {
        if let Some(Readback { down: Some(old), .. }) = self.layers[layer].readback.take() {
            self.device.downs.put_back(old);
        }
    }

    fn owes(&self) -> bool {
        let told = |layer: &DeferredLayer| {
            layer.tokens.is_some() || layer.readback.as_ref().is_some_and(|readback| readback.down.is_some())
        };
        self.layers.iter().any(told)
    }

    fn judge(&self, shapes: &[LayerShape], codecs: &[HeadCodecs]) -> Result<(), Error> {
        let device = &self.device;
        let down = {
            let _work = device.work()?;
            let bytes = self.layers.len() * CAUSES * 8;
            device.downs.bring(&device.stream, &[(self.faults.address(), bytes)])?
        };
        let found = down.done.wait().map(|()| {
            let (layers, _) = down.words().as_chunks::<{ 2 * CAUSES }>();
            let word = |[low, high]: &[u32; 2]| u64::from(*low) | u64::from(*high) << 32;
            layers.iter().enumerate().find_map(|(layer, causes)| {
                let mut causes = causes.as_chunks().0.iter().map(word).enumerate();
                let (cause, fault) = causes.find(|(_, fault)| *fault != NONE)?;
                Some((layer, cause, fault))
            })
        });
        device.downs.put_back(down);
        match found? {
            Some((layer, cause, fault)) => {
                Err(self.error(layer, &shapes[layer], &codecs[layer], cause, fault))
            }
            None => Ok(()),
        }
    }

    fn tokens(&self, layer: usize) -> Option<[Cow<'_, [f32]>; 2]> {
        let (down, [k, v]) = self.layers[layer].tokens.as_ref()?;
        let (k, rest) = split(down.words(), *k);
        Some([k, split(rest, *v).0])
    }

    fn read(&self, layer: usize, sequence: usize) -> ReadPages {
        self.layers[layer].sequences[sequence].read
    }

    fn feeds(&mut self, layer: usize, shape: &LayerShape) -> Option<Vec<HeadFeedback>> {
        let DeferredLayer { readback, sequences, .. } = &mut self.layers[layer];
        let Readback { mut feeds, masses, q, down, rows } = readback.take()?;
        let words = down.as_ref().map_or(&[][..], PinnedCopy::words);
        let (mass, rest) = words.split_at(rows * LANES);
        let q = q.map(|q| split(rest, q).0);
        for (feed, (first, passes)) in feeds.iter_mut().zip(masses) {
            feed.weighed.fill(&bytemuck::cast_slice(mass).as_chunks().0[first..]);
            feed.weighed.one_form(passes.into_iter());
        }
        if sequences.iter().any(|of| of.read != ReadPages::All) {
            together(&mut feeds);
        }
        for feed in &mut feeds {
            feed.belongs(&sequences[feed.sequence], shape, q.as_deref().map(HostSlice::F32));
        }
        down.into_iter().for_each(|down| self.device.downs.put_back(down));
        Some(feeds)
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        for DeferredLayer { tokens, readback, .. } in mem::take(&mut self.layers) {
            let downs = tokens.map(|of| of.0).into_iter().chain(readback.and_then(|readback| readback.down));
            downs.for_each(|down| self.device.downs.put_back(down));
        }
        // Later users of the memory come after this step in the stream.
        let faults = mem::take(&mut self.faults);
        self.device.downs.faults.lock().unwrap_or_else(PoisonError::into_inner).push(faults);
    }
}
