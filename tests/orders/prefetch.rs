//! A thread prefetches pages of a lower tier, while the steps that requested them attend or are dropped.

use crate::{DIM, orders, read, rows};
use pikv::tiers::{PageStore, Tiers};
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
use pikv_test::numbers::{bits, noise};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;
use std::io;
use std::sync::Mutex;

const LAYERS: usize = 3;
const SALT: [u64; 2] = [1_000, 2_000];

/// Bytes in memory, read and written in two halves with other threads in between; one of 16 reads fails.
#[derive(Debug, Default)]
struct Slow(Mutex<Vec<u8>>);

impl PageStore for Slow {
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let (at, half) = (at as usize, bytes.len() / 2);
        for (at, bytes) in [(at, &bytes[..half]), (at + half, &bytes[half..])] {
            let mut held = self.0.lock().unwrap();
            let end = held.len().max(at + bytes.len());
            held.resize(end, 0);
            held[at..at + bytes.len()].copy_from_slice(bytes);
            drop(held);
            thread::yield_now();
        }
        Ok(())
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let (at, half) = (at as usize, bytes.len() / 2);
        if thread_rng().gen_bool(1.0 / 16.0) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        bytes[..half].copy_from_slice(&self.0.lock().unwrap()[at..at + half]);
        thread::yield_now();
        let end = at + bytes.len();
        bytes[half..].copy_from_slice(&self.0.lock().unwrap()[at + half..end]);
        Ok(())
    }
}

fn config() -> CacheConfig {
    let layer = LayerShape::new(1, 1, DIM as u32, Dtype::F32);
    CacheConfig::new(vec![layer; LAYERS], 1 << 20).ring(8)
}

/// Appends and attends a step of `n` tokens, commits it if `kept`; the bits of its outputs, unless a read failed.
fn step(cache: &Cache, sequence: &mut Sequence, salt: u64, n: u32, kept: bool) -> Option<Vec<u32>> {
    let from = sequence.next_position().0;
    let mut step = cache.begin([(sequence, n)]).unwrap();
    let (mut all, mut out) = (Vec::new(), vec![0.0; n as usize * DIM]);
    for layer in 0..LAYERS {
        let salt = salt + 100_000 * layer as u64;
        step.append(layer, &rows(salt, from, n), &rows(salt + 500, from, n)).unwrap();
        let q = noise(salt + u64::from(from), n as usize * DIM);
        step.attend(layer, &q, &Attend::new(0.5), AttendOutput::new(&mut out)).ok()?;
        all.extend(bits(&out));
        if !kept && layer == 1 {
            return None;
        }
    }
    step.commit().unwrap();
    Some(all)
}

/// The outputs of each layer for the sequence of a salt after so many steps, in a cache without tiers.
fn alone(salt: u64, steps: u32) -> Vec<Vec<u32>> {
    let cache = Cache::new(config()).unwrap();
    let mut sequence = cache.sequence();
    (0..steps).for_each(|_| assert!(step(&cache, &mut sequence, salt, 40, true).is_some()));
    (0..LAYERS).map(|layer| read(&cache, layer, &sequence).unwrap()).collect()
}

/// Steps over pages that lie below, some of which are dropped halfway; returns how many were committed.
fn decode(cache: &Cache, salt: u64) -> (Sequence, u32) {
    let (mut sequence, mut steps) = (cache.sequence(), 0);
    for _ in 0..5 {
        let kept = thread_rng().gen_bool(0.7);
        steps += u32::from(step(cache, &mut sequence, salt, 40, kept).is_some());
        match thread_rng().gen_range(0..3) {
            0 => drop(sequence.demote(u64::MAX).unwrap()),
            1 => drop(sequence.promote(2_000)),
            _ => drop(sequence.demote(1_500).unwrap()),
        }
    }
    (sequence, steps)
}

fn decode_from_below() {
    let tiers = Tiers::new().staging(12_000).store("slow", 1 << 20, || Ok(Box::new(Slow::default())));
    let cache = Cache::new(config().tiers(tiers)).unwrap();
    let tasks = SALT.map(|salt| {
        let cache = cache.clone();
        thread::spawn(move || decode(&cache, salt))
    });
    for (task, salt) in tasks.into_iter().zip(SALT) {
        let (sequence, steps) = task.join().unwrap();
        if steps > 0 {
            let expected = alone(salt, steps);
            for (layer, expected) in expected.iter().enumerate() {
                // One of 16 reads fails, each time another.
                let mut got = read(&cache, layer, &sequence);
                for _ in 0..64 {
                    if matches!(got, Err(Error::Tier { .. })) {
                        got = read(&cache, layer, &sequence);
                    }
                }
                assert_eq!(&got.unwrap(), expected, "layer {layer} after {steps} steps");
            }
        }
    }
    // No page is held.
    assert_eq!(cache.usage().tiers[0].bytes, 0);
}

#[test]
fn pages_come_up_while_steps_attend_and_are_dropped() {
    shuttle::check_random(decode_from_below, orders(1_000));
}

#[test]
fn pages_come_up_with_few_changes_of_thread() {
    shuttle::check_pct(decode_from_below, orders(1_000), 4);
}
