//! Products with weights that stay in the blocks of a file.

use half::f16;
use pikv_engine::common::blocks::{Blocks, Form, ROWS};
use pikv_engine::common::sample::SplitMix;
use pikv_engine::llama::quant::Kind;

/// More outputs than a thread takes at a time.
const OUTPUTS: usize = 150;
const INPUTS: usize = 96;

/// Random blocks of a form.
fn blocks(form: Form, random: &mut SplitMix) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..OUTPUTS * INPUTS / 32 {
        let scales = if form == Form::Four { 2 } else { 1 };
        (0..scales).for_each(|_| bytes.extend(f16::from_f32(random.unit() as f32 - 0.5).to_le_bytes()));
        bytes.extend((0..if form == Form::Four { 16 } else { 32 }).map(|_| random.next() as u8));
    }
    bytes
}

#[test]
fn products_of_blocks_are_those_of_their_weights() {
    let mut random = SplitMix(5);
    for (form, kind) in [(Form::Four, Kind::Q4_1), (Form::Eight, Kind::Q8_0)] {
        let bytes = blocks(form, &mut random);
        let weights = kind.to_f32(&bytes);
        let (first, second) = bytes.split_at(bytes.len() / 3);
        let held = Blocks::new(form, INPUTS, &[first.to_vec(), second.to_vec()]);
        assert_eq!(held.outputs(), OUTPUTS);
        let mut widened = Vec::new();
        [false, true].iter().for_each(|threads| {
            widened.fill(0.0);
            held.widen(*threads, &mut widened);
            assert!(widened.iter().zip(&weights).all(|(a, b)| a.to_bits() == b.to_bits()), "{form:?}");
        });
        let x: Vec<f32> = (0..ROWS * INPUTS).map(|_| random.unit() as f32 - 0.5).collect();
        let mut all = vec![0.0; ROWS * OUTPUTS];
        held.mul(&x, &mut all, true);
        for (x, y) in x.chunks_exact(INPUTS).zip(all.chunks_exact(OUTPUTS)) {
            let mut alone = vec![0.0; OUTPUTS];
            held.mul(x, &mut alone, false);
            assert_eq!(alone, y, "{form:?}: a row has other bits alone");
            for (y, weights) in y.iter().zip(weights.chunks_exact(INPUTS)) {
                let terms = || weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                let most: f64 = terms().map(f64::abs).sum();
                let off = (f64::from(*y) - terms().sum::<f64>()).abs();
                assert!(off <= 2e-6 * most, "{form:?}: {off} of {most}");
            }
        }
    }
}
