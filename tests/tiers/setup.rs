//! A store that fails on demand, and generated tokens.

use pikv::tiers::{PageStore, Tiers};
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Sequence, Step};
use pikv_test::backend::backend;
use pikv_test::numbers::noise;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

/// Controls and counters of a store.
#[derive(Debug, Default)]
pub struct Control {
    /// Writes that are refused, as by a full disk.
    pub full: AtomicBool,
    /// Reads that are refused.
    pub unreadable: AtomicBool,
    /// Reads that return a bit that was not written.
    pub corrupt: AtomicBool,
    /// Reads that panic.
    pub panics: AtomicBool,
    pub written: AtomicU64,
    pub read: AtomicU64,
    /// Reads by the cache's thread.
    pub early: AtomicU64,
    /// While shut, the cache's thread waits before it reads.
    shut: Mutex<bool>,
    opened: Condvar,
    /// Reads that wait.
    pub waiting: AtomicU64,
}

impl Control {
    pub fn shut(&self, on: bool) {
        *self.shut.lock().unwrap() = on;
        self.opened.notify_all();
    }

    /// Until `there`, for twenty seconds at most.
    pub fn until(&self, there: impl Fn(&Control) -> bool) {
        let from = std::time::Instant::now();
        while !there(self) {
            assert!(from.elapsed().as_secs() < 20, "{self:?}");
            std::thread::yield_now();
        }
    }
}

#[derive(Debug)]
struct Fake {
    bytes: Mutex<Vec<u8>>,
    control: Arc<Control>,
}

impl PageStore for Fake {
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let mut all = self.bytes.lock().unwrap();
        let end = at as usize + bytes.len();
        if all.len() < end {
            all.resize(end, 0xee);
        }
        if self.control.full.load(SeqCst) {
            // As a disk does, after writing a part.
            all[at as usize..end - bytes.len() / 2].copy_from_slice(&bytes[..bytes.len() - bytes.len() / 2]);
            return Err(io::ErrorKind::StorageFull.into());
        }
        all[at as usize..end].copy_from_slice(bytes);
        self.control.written.fetch_add(1, SeqCst);
        Ok(())
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let early = std::thread::current().name() == Some("pikv-tiers");
        if early {
            let mut shut = self.control.shut.lock().unwrap();
            self.control.waiting.fetch_add(1, SeqCst);
            while *shut {
                shut = self.control.opened.wait(shut).unwrap();
            }
            self.control.waiting.fetch_sub(1, SeqCst);
        }
        assert!(!self.control.panics.load(SeqCst), "a store that panics");
        if self.control.unreadable.load(SeqCst) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.copy_from_slice(&self.bytes.lock().unwrap()[at as usize..][..bytes.len()]);
        if self.control.corrupt.load(SeqCst) {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
        }
        self.control.read.fetch_add(1, SeqCst);
        self.control.early.fetch_add(u64::from(early), SeqCst);
        Ok(())
    }
}

/// `tiers`, and below them a store of `bytes` controlled by `control`.
pub fn fake(tiers: Tiers, bytes: u64, control: &Arc<Control>) -> Tiers {
    let control = control.clone();
    let open = move || {
        let fake = Fake { bytes: Mutex::default(), control: control.clone() };
        Ok(Box::new(fake) as Box<dyn PageStore>)
    };
    tiers.store("fake", bytes, open)
}

/// Two KV heads of two query heads each, 4 channels of f32: a page has 1664 bytes.
pub fn shape() -> LayerShape {
    LayerShape::new(2, 4, 4, Dtype::F32)
}

pub const PAGE_BYTES: u64 = 1664;

/// Layers of `shape`, a ring of 8 tokens.
pub fn config(layers: usize, budget: u64) -> CacheConfig {
    CacheConfig::new(vec![shape(); layers], budget).ring(8).nan_fill(true).backend(backend())
}

pub fn append(step: &mut Step<'_>, layer: usize, n: u32, seed: u64) {
    let (n, seed) = (n as usize, seed * 1000 + layer as u64 * 3);
    step.append(layer, &noise(seed, n * 8), &noise(seed + 1, n * 8)).unwrap();
}

pub fn attend(step: &mut Step<'_>, layer: usize, n: u32, seed: u64, how: &Attend) -> Result<Vec<f32>, Error> {
    let mut out = vec![0.0; n as usize * 16];
    let q = noise(seed * 1000 + layer as u64 * 3 + 2, n as usize * 16);
    step.attend(layer, &q, how, AttendOutput::new(&mut out))?;
    Ok(out)
}

/// A step of `n` tokens, and the outputs of its layers.
pub fn feed(cache: &Cache, sequence: &mut Sequence, n: u32, seed: u64) -> Result<Vec<Vec<f32>>, Error> {
    let layers = cache.config().layers.len();
    let mut step = cache.begin([(&mut *sequence, n)])?;
    let mut outs = Vec::new();
    for layer in 0..layers {
        append(&mut step, layer, n, seed);
        outs.push(attend(&mut step, layer, n, seed, &Attend::new(1.0))?);
    }
    step.commit()?;
    Ok(outs)
}

/// Bytes of pages in each tier of a cache, the first one first.
pub fn bytes(cache: &Cache) -> Vec<u64> {
    let usage = cache.usage();
    std::iter::once(usage.shards.iter().sum()).chain(usage.tiers.iter().map(|tier| tier.bytes)).collect()
}
