//! What the host is told of a step whose tensors lie on the device, once it waits: what was wrong with them, and what policies want to
//! know.

use super::Device;
use super::stream::{Moment, Stream};
use super::work::{Memory, Pinned};
use crate::attend::Read;
use crate::config::HeadCodecs;
use crate::device::DeviceSlice;
use crate::error::Error;
use crate::mass::together;
use crate::observe::{Feed, Of};
use pikv_core::dtype::Dtype;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use std::borrow::Cow;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

/// Words of 64 bits a layer, in which kernels note faults: of k, v, q, scores and outputs. The element is in the upper half.
const CAUSES: usize = 5;
/// No fault.
const NONE: u64 = u64::MAX;

/// Words on their way down to pinned memory.
#[derive(Debug)]
pub(super) struct Down {
    host: Pinned,
    words: usize,
    /// After the copy.
    done: Moment,
}

impl Down {
    /// Once it has passed.
    fn words(&self) -> &[u32] {
        &self.host.words()[..self.words]
    }
}

/// The words that a tensor takes, and those after it.
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

/// What may be used again.
#[derive(Debug, Default)]
pub(super) struct Downs {
    spare: Mutex<Vec<Down>>,
    faults: Mutex<Vec<Memory>>,
}

impl Downs {
    /// Starts to bring bytes down from several places, one after the other, each in words of its own.
    pub fn bring(&self, stream: &Stream, places: &[(u64, usize)]) -> Result<Down, Error> {
        let all = places.iter().map(|(_, bytes)| bytes.div_ceil(4)).sum();
        let taken = {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = (0..spare.len()).filter(|i| spare[*i].host.room() >= all);
            let best = fits.min_by_key(|i| spare[*i].host.room());
            let best = best.or_else(|| (0..spare.len()).max_by_key(|i| spare[*i].host.room()));
            best.map(|i| spare.swap_remove(i))
        };
        let mut down = match taken {
            Some(down) => down,
            None => Down { host: Pinned::default(), words: 0, done: Moment::new()? },
        };
        let brought = down.bring(stream, places, all);
        if let Err(error) = brought {
            self.put_back(down);
            return Err(error);
        }
        Ok(down)
    }

    fn put_back(&self, down: Down) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(down);
    }
}

impl Down {
    fn bring(&mut self, stream: &Stream, places: &[(u64, usize)], all: usize) -> Result<(), Error> {
        // Nobody waited for what was not wanted in the end.
        self.done.wait()?;
        let to = &mut self.host.reserve(all)?[..all];
        // SAFETY: as long as all places, and nobody reads or writes there before `done`.
        unsafe { stream.down(places.iter().copied(), to)? };
        self.words = all;
        Ok(self.done.record(stream)?)
    }
}

/// What attention over a layer saw.
#[derive(Debug, Default)]
pub(super) struct Saw {
    pub feeds: Vec<Feed>,
    /// Of each feed its first row of masses, and pages that are listed in several forms; none where no mass is wanted.
    pub masses: Vec<(usize, Vec<usize>)>,
    /// The queries, if they are wanted.
    pub q: Option<DeviceSlice>,
    /// The masses, then the queries, if either is wanted.
    pub down: Option<Down>,
    /// Rows of masses.
    pub rows: usize,
}

#[derive(Debug, Default)]
struct Layer {
    /// Keys and values of all rows.
    tokens: Option<(Down, [DeviceSlice; 2])>,
    saw: Option<Saw>,
    sequences: Vec<Of>,
    /// What rows read; unless it is all they were attended one by one.
    read: Read,
    scale: f32,
    /// The name of the dtype of outputs.
    out: &'static str,
}

/// What the host is told later.
pub(crate) struct Late {
    device: Arc<Device>,
    /// `[layers][CAUSES]`
    faults: Memory,
    layers: Vec<Layer>,
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late").field("layers", &self.layers).finish_non_exhaustive()
    }
}

/// Of whom a policy wants to know what attention saw.
pub(crate) struct Asked {
    pub sequences: Vec<Of>,
    pub read: Read,
}

impl Late {
    pub fn new(device: &Arc<Device>, layers: usize) -> Result<Late, Error> {
        device.enter()?;
        let bytes = (layers * CAUSES * 8) as u64;
        let known = {
            let mut faults = device.downs.faults.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = faults.iter().position(|memory| memory.bytes() >= bytes);
            fits.map(|i| faults.swap_remove(i))
        };
        let faults = known.map_or_else(|| Memory::new(bytes), Ok)?;
        device.fill(faults.address(), u32::MAX, (bytes / 4) as u32)?;
        let layers = (0..layers).map(|_| Layer::default()).collect();
        Ok(Late { device: device.clone(), faults, layers })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Where a fault is noted: of k and the words after it, or of q and the word after it.
    pub fn fault(&self, layer: usize, cause: usize) -> u64 {
        self.faults.address() + (8 * (layer * CAUSES + cause)) as u64
    }

    /// Starts to bring keys and values down, for a policy that looks at them.
    pub fn bring_tokens(&mut self, layer: usize, of: [DeviceSlice; 2]) -> Result<(), Error> {
        let _work = self.device.work()?;
        let places = of.map(|of| (of.address(), of.bytes()));
        let tokens = self.device.downs.bring(&self.device.stream, &places)?;
        if let Some((old, _)) = self.layers[layer].tokens.replace((tokens, of)) {
            self.device.downs.put_back(old);
        }
        Ok(())
    }

    /// Notes what attention over a layer saw; of several calls the last counts.
    pub(super) fn saw(&mut self, layer: usize, saw: Saw, scale: f32, out: Dtype) {
        let layer = &mut self.layers[layer];
        (layer.scale, layer.out) = (scale, out.name());
        if let Some(Saw { down: Some(old), .. }) = layer.saw.replace(saw) {
            self.device.downs.put_back(old);
        }
    }

    /// Notes what is asked of what it saw.
    pub fn asked(&mut self, layer: usize, asked: Asked) {
        let layer = &mut self.layers[layer];
        (layer.sequences, layer.read) = (asked.sequences, asked.read);
    }

    /// Forgets what attention saw of a layer: a later call counts.
    pub fn forget(&mut self, layer: usize) {
        if let Some(Saw { down: Some(old), .. }) = self.layers[layer].saw.take() {
            self.device.downs.put_back(old);
        }
    }

    /// Whether a policy wants to know something.
    pub fn owes(&self) -> bool {
        let told = |layer: &Layer| {
            layer.tokens.is_some() || layer.saw.as_ref().is_some_and(|saw| saw.down.is_some())
        };
        self.layers.iter().any(told)
    }

    /// Waits for all that was asked for, and says what was wrong first: by layers, of each k, v, q, scores, then outputs.
    pub fn judge(&self, shapes: &[LayerShape], codecs: &[HeadCodecs]) -> Result<(), Error> {
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
            // The dtype's own limit is the first that is looked at.
            let past = value.is_nan() || value.abs() > dtype.limit();
            let limit = each.filter(|_| !past).unwrap_or(dtype.largest());
            let (row, channel, dtype) = (at / (dim as usize * heads), at as u32 % dim, dtype.name());
            Error::Unstorable { what, layer, kv_head, row, channel, value, dtype, limit }
        };
        let heads = shape.query_heads as usize;
        // Row, query head and channel.
        let place = |dim: u32| (at / (heads * dim as usize), at / dim as usize % heads, at % dim as usize);
        let Layer { scale, out, .. } = self.layers[layer];
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

    /// Keys and values of a layer, if a policy wants them; they were waited for.
    pub fn tokens(&self, layer: usize) -> Option<[Cow<'_, [f32]>; 2]> {
        let (down, [k, v]) = self.layers[layer].tokens.as_ref()?;
        let (k, rest) = split(down.words(), *k);
        Some([k, split(rest, *v).0])
    }

    /// What rows of a layer read.
    pub fn read(&self, layer: usize) -> Read {
        self.layers[layer].read
    }

    /// What a layer's policy is told, if attention was given tensors of the device last; it was waited for.
    pub fn feeds(&mut self, layer: usize, shape: &LayerShape) -> Option<Vec<Feed>> {
        let Layer { saw, sequences, read, .. } = &mut self.layers[layer];
        let Saw { mut feeds, masses, q, down, rows } = saw.take()?;
        let words = down.as_ref().map_or(&[][..], Down::words);
        let (mass, rest) = words.split_at(rows * LANES);
        let q = q.map(|q| split(rest, q).0);
        for (feed, (first, passes)) in feeds.iter_mut().zip(masses) {
            feed.weighed.fill(&bytemuck::cast_slice(mass).as_chunks().0[first..]);
            feed.weighed.one_form(passes.into_iter());
        }
        if *read != Read::All {
            together(&mut feeds);
        }
        for feed in &mut feeds {
            feed.belongs(&sequences[feed.sequence], shape, q.as_deref());
        }
        down.into_iter().for_each(|down| self.device.downs.put_back(down));
        Some(feeds)
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        for Layer { tokens, saw, .. } in mem::take(&mut self.layers) {
            let downs = tokens.map(|of| of.0).into_iter().chain(saw.and_then(|saw| saw.down));
            downs.for_each(|down| self.device.downs.put_back(down));
        }
        // Whoever takes it next is behind in the stream.
        let faults = mem::take(&mut self.faults);
        self.device.downs.faults.lock().unwrap_or_else(PoisonError::into_inner).push(faults);
    }
}
