//! Attention of a teacher over its own keys, and of a student over keys decoded from a low-rank map.

use super::eigen::matrix;
use super::{FitError, Map, Moments, Segment};
use nalgebra::DMatrix;
use pikv_core::rope::Rope;

/// Scale of logits, weight of the teacher in the skew KL, and rotation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub scale: f64,
    pub skew: f64,
    pub rope: Option<Rope>,
}

/// A segment with the teacher's attention weights.
pub(super) struct Teacher {
    /// Keys minus the bias, `[rows][wide]`.
    x: DMatrix<f64>,
    /// For each query head, scaled and rotated queries, `[rows][wide]`.
    q: Vec<DMatrix<f64>>,
    /// For each query head, its causal attention: entry `(j, i)` is the weight of key `j` for query `i`, so that a query's column is
    /// contiguous.
    p: Vec<DMatrix<f64>>,
}

/// The two matrices of a key map, to be fitted, and its fixed bias.
#[derive(Clone)]
pub(super) struct Student {
    pub encode: DMatrix<f64>,
    pub decode: DMatrix<f64>,
    bias: Option<Vec<f64>>,
}

/// Losses summed over rows and query heads.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loss {
    /// 0 if the gradient is computed, which does not need it.
    pub kl: f64,
    pub skew_kl: f64,
    pub rows: u64,
}

/// Derivatives of the mean skew KL of a segment.
pub(super) struct Gradient {
    pub encode: DMatrix<f64>,
    pub decode: DMatrix<f64>,
}

impl Student {
    pub fn new(map: &Map) -> Student {
        let bias = map.bias().map(|b| b.iter().map(|x| f64::from(*x)).collect());
        let (wide, narrow) = (map.wide() as usize, map.narrow() as usize);
        Student { encode: matrix(&map.encode(), wide), decode: matrix(&map.decode(), narrow), bias }
    }

    /// The map, its matrices rounded to f32.
    pub fn map(&self) -> Result<Map, FitError> {
        let values = |m: &DMatrix<f64>| {
            (0..m.nrows()).flat_map(|r| (0..m.ncols()).map(move |c| m[(r, c)] as f32)).collect()
        };
        let bias = self.bias.as_ref().map(|b| b.iter().map(|x| *x as f32).collect());
        let (wide, narrow) = (self.encode.ncols() as u32, self.encode.nrows() as u32);
        Ok(Map::new(wide, narrow, values(&self.encode), values(&self.decode), bias)?)
    }

    /// The student's decoded keys, rotated.
    fn keys(&self, stored: &DMatrix<f64>, rope: Option<Rope>) -> DMatrix<f64> {
        let mut keys = stored * self.decode.transpose();
        shift(&mut keys, self.bias.as_deref(), 1.0);
        turn(&mut keys, rope, 1.0);
        keys
    }

    /// The loss over `teacher`, and its gradient if `gradient` is set.
    pub fn loss(&self, teacher: &Teacher, s: &Setting, gradient: bool) -> (Loss, Option<Gradient>) {
        let rows = teacher.x.nrows();
        let stored = &teacher.x * self.encode.transpose();
        let keys = self.keys(&stored, s.rope);
        let mut loss = Loss { rows: (rows * teacher.q.len()) as u64, ..Loss::default() };
        let mut slope = DMatrix::zeros(rows, self.encode.ncols());
        for (q, p) in teacher.q.iter().zip(&teacher.p) {
            let mut weights = causal(&keys * q.transpose());
            for i in 0..rows {
                // KL(p || m), m = skew p + (1 - skew) w; its derivative by w_j is -(1 - skew) p_j / m_j.
                let mut mean = 0.0;
                for j in 0..=i {
                    let (p, w) = (p[(j, i)], weights[(j, i)]);
                    if p > 0.0 {
                        let m = s.skew * p + (1.0 - s.skew) * w;
                        loss.skew_kl += p * (p / m).ln();
                        if !gradient {
                            loss.kl += p * (p / w.max(f64::MIN_POSITIVE)).ln();
                        }
                        mean -= w * (1.0 - s.skew) * p / m;
                    }
                }
                for j in 0..=i {
                    let (p, w) = (p[(j, i)], weights[(j, i)]);
                    let m = s.skew * p + (1.0 - s.skew) * w;
                    let g = if p > 0.0 { -(1.0 - s.skew) * p / m } else { 0.0 };
                    weights[(j, i)] = w * (g - mean) / loss.rows as f64;
                }
            }
            if gradient {
                slope += &weights * q;
            }
        }
        turn(&mut slope, s.rope, -1.0);
        let gradient = gradient.then(|| Gradient {
            decode: slope.tr_mul(&stored),
            encode: (&slope * &self.decode).tr_mul(&teacher.x),
        });
        (loss, gradient)
    }
}

impl Teacher {
    /// The teacher of `segment`, for a student of `map`; adds the attention outputs to `outputs`.
    ///
    /// # Errors
    /// Slices of different numbers of rows, values that are not finite.
    pub fn new(
        segment: &Segment,
        map: &Map,
        setting: &Setting,
        outputs: &mut Moments,
    ) -> Result<Teacher, FitError> {
        let (kd, vd) = (map.wide() as usize, outputs.dim() as usize);
        let rows = segment.k.len() / kd;
        let group = segment.q.len() / (rows.max(1) * kd);
        for (what, values, width) in
            [("q", &segment.q, group.max(1) * kd), ("k", &segment.k, kd), ("v", &segment.v, vd)]
        {
            if rows == 0 || values.len() != rows * width {
                return Err(FitError::Rows { what, len: values.len(), rows, width });
            }
            super::moments::finite(what, values)?;
        }
        let mut keys = matrix(&segment.k, kd);
        let mut x = keys.clone();
        let bias: Option<Vec<f64>> = map.bias().map(|b| b.iter().map(|x| f64::from(*x)).collect());
        shift(&mut x, bias.as_deref(), -1.0);
        turn(&mut keys, setting.rope, 1.0);
        let values = matrix(&segment.v, vd);
        let (mut q, mut p) = (Vec::new(), Vec::new());
        for head in 0..group {
            let at = |r: usize, c: usize| segment.q[(r * group + head) * kd + c];
            let mut rotated = DMatrix::from_fn(rows, kd, |r, c| setting.scale * f64::from(at(r, c)));
            turn(&mut rotated, setting.rope, 1.0);
            let weights = causal(&keys * rotated.transpose());
            let attended = weights.tr_mul(&values);
            for r in 0..rows {
                let row: Vec<f32> = (0..vd).map(|c| attended[(r, c)] as f32).collect();
                outputs.add(&row);
            }
            q.push(rotated);
            p.push(weights);
        }
        Ok(Teacher { x, q, p })
    }
}

/// Adds `sign` times the bias to every row.
fn shift(rows: &mut DMatrix<f64>, bias: Option<&[f64]>, sign: f64) {
    for (c, bias) in bias.into_iter().flatten().enumerate() {
        for r in 0..rows.nrows() {
            rows[(r, c)] += sign * bias;
        }
    }
}

/// Rotates row `t` by position `t`, or back where `sign` is -1.
fn turn(rows: &mut DMatrix<f64>, rope: Option<Rope>, sign: f64) {
    let Some(rope) = rope else { return };
    for i in 0..rope.rotary_dim as usize / 2 {
        let (a, b) = rope.pair(i);
        let step = libm::pow(rope.theta, -2.0 * i as f64 / f64::from(rope.rotary_dim));
        for t in 0..rows.nrows() {
            let (sin, cos) = libm::sincos(sign * t as f64 * step);
            let (x, y) = (rows[(t, a)], rows[(t, b)]);
            rows[(t, a)] = x * cos - y * sin;
            rows[(t, b)] = y * cos + x * sin;
        }
    }
}

/// The softmax of column `i` over rows `0..=i`; 0 in the other rows.
fn causal(mut logits: DMatrix<f64>) -> DMatrix<f64> {
    for i in 0..logits.ncols() {
        let top = (0..=i).map(|j| logits[(j, i)]).fold(f64::NEG_INFINITY, f64::max);
        let mut sum = 0.0;
        for j in 0..=i {
            let e = (logits[(j, i)] - top).exp();
            logits[(j, i)] = e;
            sum += e;
        }
        for j in 0..logits.nrows() {
            logits[(j, i)] = if j <= i { logits[(j, i)] / sum } else { 0.0 };
        }
    }
    logits
}

#[cfg(test)]
mod tests {
    use super::*;
    use pikv_core::hash;

    fn noise(state: &mut u64, n: usize) -> Vec<f32> {
        (0..n).map(|_| (hash::next(state) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    #[test]
    fn the_gradient_is_that_of_small_differences() {
        let (rows, wide, narrow, mut state) = (7, 6u32, 3u32, 9);
        let turning = Rope::new(50.0, 4);
        for (rope, biased) in [(None, false), (Some(turning), true)] {
            let mut some = |n: usize| noise(&mut state, n);
            let bias = biased.then(|| some(6));
            let map = Map::new(wide, narrow, some(18), some(18), bias).unwrap();
            let segment = Segment { q: some(rows * 12), k: some(rows * 6), v: some(rows * 2) };
            let setting = Setting { scale: 1.5, skew: 0.1, rope };
            let teacher = Teacher::new(&segment, &map, &setting, &mut Moments::new(2).unwrap()).unwrap();
            let student = Student::new(&map);
            let gradient = student.loss(&teacher, &setting, true).1.unwrap();
            let value = |s: &Student| {
                let loss = s.loss(&teacher, &setting, false).0;
                loss.skew_kl / loss.rows as f64
            };
            for at in 0..18 {
                let (up, down) = ((at / 3, at % 3), (at / 6, at % 6));
                let mut moved = [(); 4].map(|()| student.clone());
                moved[0].decode[up] += 1e-5;
                moved[1].decode[up] -= 1e-5;
                moved[2].encode[down] += 1e-5;
                moved[3].encode[down] -= 1e-5;
                let [a, b, c, d] = [0, 1, 2, 3].map(|i| value(&moved[i]));
                assert!(((a - b) / 2e-5 - gradient.decode[up]).abs() < 1e-8, "decode {up:?}");
                assert!(((c - d) / 2e-5 - gradient.encode[down]).abs() < 1e-8, "encode {down:?}");
            }
        }
    }
}
