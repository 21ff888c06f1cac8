//! Several caches on one device, which share its buffers: each has rotations of its own.

use crate::script::{Op, Options, Run};
use crate::standin::{Get, Standin};
use crate::suite::{config, decode, shape};
use pikv::{Backend, Dtype, Rope};

/// A run of a cache whose keys are rotated by `theta` when they are read.
fn run(backend: &Backend, theta: f64) -> Run {
    let layer = shape(1, 2, 8, 8, Dtype::Bf16, Dtype::F16).rope(Some(Rope::new(theta, 8)));
    Run::new(config(vec![layer], 16, 4).backend(backend.clone()), Options::default()).unwrap()
}

fn ops() -> Vec<Op> {
    let mut ops = vec![Op::Feed(vec![(0, 40)])];
    ops.extend(decode(3));
    ops
}

/// Results of caches with these rotations, used in turn.
fn in_turn(backend: &Backend, thetas: &[f64]) -> Vec<Vec<u32>> {
    let mut runs: Vec<Run> = thetas.iter().map(|theta| run(backend, *theta)).collect();
    for op in ops() {
        runs.iter_mut().for_each(|run| run.act(&op).unwrap());
    }
    let finish = |mut run: Run| {
        run.look().unwrap();
        run.record
    };
    runs.into_iter().map(finish).collect()
}

#[test]
fn caches_with_other_rotations_are_used_in_turn() {
    let standin = Standin::new();
    let thetas = [100.0, 1000.0, 100.0];
    let want = in_turn(&Backend::CPU, &thetas);
    assert!(want[0] != want[1] && want[0] == want[2]);
    assert!(in_turn(&standin.backend(), &thetas) == want);
}

#[test]
fn rotations_of_caches_that_are_gone_are_neither_read_nor_kept() {
    let standin = Standin::new();
    let backend = standin.backend();
    let mut held = Vec::new();
    for i in 0..6 {
        let theta = [100.0 + f64::from(i)];
        assert!(in_turn(&backend, &theta) == in_turn(&Backend::CPU, &theta), "cache {i}");
        held.push(standin.get(Get::Bytes));
    }
    assert!(held[1..].iter().all(|bytes| *bytes == held[1]), "{held:?}");
}
