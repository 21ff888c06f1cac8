//! C_Dis: a small encoder and decoder fitted to the teacher's attention (arXiv 2508.06526, C_Dis; the loss is the skew KL of
//! DistiLLM, arXiv 2402.03898).

use super::eigen::low_rank;
use super::student::{Gradient, Loss, Setting, Student, Teacher};
use super::{FitError, Map, Moments, Segment};
use nalgebra::DMatrix;
use pikv_core::hash;
use pikv_core::rope::Rope;

/// Options of distillation, for one head.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub struct Distil {
    /// Steps of gradient descent, one segment each. Default 300.
    pub steps: u32,
    /// Step size of Adam, relative to the root mean square of each initial matrix; it falls to 0 along a cosine. Above 0 and at most 1;
    /// default 0.05.
    pub rate: f64,
    /// `lambda` of the skew KL. Above 0 and below 1; default 0.1.
    pub skew: f64,
    /// Share of the segments held out for measurement. Above 0 and below 1, at least one segment; default 0.25.
    pub held: f64,
    /// Scale of logits; `None`, the default, is `1 / sqrt(k_dim)`.
    pub scale: Option<f64>,
    /// Rotation of queries and keys, if segments hold them before rotation. Default none.
    pub rope: Option<Rope>,
    /// Seed of the order of segments. Default 0.
    pub seed: u64,
}

setters!(Distil { steps: u32, rate: f64, skew: f64, held: f64, seed: u64 } optional { scale: f64, rope: Rope });

impl Default for Distil {
    fn default() -> Self {
        Distil { steps: 300, rate: 0.05, skew: 0.1, held: 0.25, scale: None, rope: None, seed: 0 }
    }
}

/// Losses on the held-out segments.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub struct Measured {
    /// Mean `KL(p || q)` over rows and query heads, in nats: `p` the teacher's attention, `q` the student's.
    pub kl: f64,
    /// Mean `KL(p || lambda p + (1 - lambda) q)`.
    pub skew_kl: f64,
    /// `sum |o - o~|^2 / sum |o|^2` over the attention outputs, under the teacher's weights.
    pub output: f64,
}

/// The fitted maps of a head, and their losses.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub struct Distilled {
    /// Map of keys.
    pub k: Map,
    /// Map of values.
    pub v: Map,
    /// Losses of the initial maps.
    pub before: Measured,
    /// Losses of the fitted maps. None is above that of `before`.
    pub after: Measured,
}

/// Fits the maps of one KV head to `segments` of its rows, starting from `k` and `v` ([`svd`](super::svd) maps, for example). Ranks and
/// biases stay as they are.
///
/// Needs the feature `fit`.
///
/// **Keys**: minimises the mean of `KL(p || lambda p + (1 - lambda) q)` by Adam (arXiv 1412.6980) in f64, one segment a step. The
/// teacher `p` is mixed into the student `q`, which bounds the logarithm by `-ln lambda`. **Values**: weights add up to 1, so the output
/// error under the teacher's attention is `|(I - D E)(o - b)|^2`; its minimum is the principal directions of the outputs `o`, found
/// without descent.
///
/// After each tenth of the steps, the matrices rounded to f32 are measured on the held-out segments. The best of these and the initial
/// maps is returned, so no loss on those rows rises. (The choice among eleven makes `after` slightly optimistic; measure on other rows
/// for an unbiased figure.) `progress(step, loss)` is called with each step's loss on its own segment.
///
/// A step costs about `4 rows^2 group k_dim` multiply-adds. The result depends on the arguments and on the instruction set used for
/// matrix products, not on threads.
///
/// # Errors
/// Fewer than 2 segments, segments of other widths than the maps' or with values that are not finite, options out of range.
#[cfg(feature = "fit")]
pub fn distil(
    segments: &[Segment],
    k: &Map,
    v: &Map,
    options: &Distil,
    mut progress: impl FnMut(u32, f64),
) -> Result<Distilled, FitError> {
    let setting = check(options, k, segments.len())?;
    let held = ((options.held * segments.len() as f64).ceil() as usize).clamp(1, segments.len() - 1);
    let (fitted, held) = segments.split_at(segments.len() - held);
    let teach = |segments: &[Segment]| -> Result<(Vec<Teacher>, Moments), FitError> {
        let mut outputs = Moments::new(v.wide())?;
        let teachers = segments.iter().map(|s| Teacher::new(s, k, &setting, &mut outputs));
        Ok((teachers.collect::<Result<_, _>>()?, outputs))
    };
    let ((fitted, outputs), (held, held_outputs)) = (teach(fitted)?, teach(held)?);

    let start = measure(&Student::new(k), &held, &setting);
    let (mut best_k, mut best) = (k.clone(), start);
    let mut student = Student::new(k);
    let (mut down, mut up) = (Adam::new(&student.encode), Adam::new(&student.decode));
    let mut state = options.seed;
    for step in 1..=options.steps {
        let teacher = &fitted[(hash::next(&mut state) % fitted.len() as u64) as usize];
        let (loss, gradient) = student.loss(teacher, &setting, true);
        progress(step, loss.skew_kl / loss.rows as f64);
        let turn = std::f64::consts::PI * f64::from(step) / f64::from(options.steps);
        let rate = options.rate * (1.0 + libm::cos(turn)) / 2.0;
        if let Some(Gradient { encode, decode }) = gradient {
            down.step(&mut student.encode, &encode, rate);
            up.step(&mut student.decode, &decode, rate);
        }
        if step % options.steps.div_ceil(10) == 0 || step == options.steps {
            let map = student.map()?;
            let found = measure(&Student::new(&map), &held, &setting);
            if found.0 < best.0 && found.1 <= start.1 {
                (best_k, best) = (map, found);
            }
        }
    }

    let center: Option<Vec<f64>> = v.bias().map(|b| b.iter().map(|x| f64::from(*x)).collect());
    let second = outputs.second(center.as_deref())?;
    let fitted_v = low_rank(v.wide(), &second, v.narrow(), v.bias().map(<[f32]>::to_vec))?.map;
    let energy: f64 = held_outputs.energy().iter().sum();
    let lost = |map: &Map| -> Result<f64, FitError> {
        Ok(if energy > 0.0 { held_outputs.residual(map)? / energy } else { 0.0 })
    };
    let (was, is) = (lost(v)?, lost(&fitted_v)?);
    let (best_v, is) = if is < was { (fitted_v, is) } else { (v.clone(), was) };
    let measured = |(skew_kl, kl), output| Measured { kl, skew_kl, output };
    Ok(Distilled { k: best_k, v: best_v, before: measured(start, was), after: measured(best, is) })
}

fn check(options: &Distil, k: &Map, segments: usize) -> Result<Setting, FitError> {
    let Distil { rate, skew, held, scale, rope, .. } = *options;
    if segments < 2 {
        return Err(FitError::TooFew { what: "segments", have: segments as u64, least: 2 });
    }
    let open = |x: f64| x > 0.0 && x < 1.0;
    let scale = scale.unwrap_or(1.0 / f64::from(k.wide()).sqrt());
    let between = "above 0 and below 1";
    for (name, value, ok, range) in [
        ("rate", rate, rate > 0.0 && rate <= 1.0, "above 0 and at most 1"),
        ("skew", skew, open(skew), between),
        ("held", held, open(held), between),
        ("scale", scale, scale.is_finite() && scale != 0.0, "finite and not 0"),
    ] {
        if !ok {
            return Err(FitError::Setting { name, value, range });
        }
    }
    if let Some(Rope { theta, rotary_dim, .. }) = rope {
        if !(theta.is_finite() && theta >= 1.0) {
            return Err(FitError::Setting { name: "theta", value: theta, range: "finite and at least 1" });
        }
        if rotary_dim < 2 || rotary_dim > k.wide() || !rotary_dim.is_multiple_of(2) {
            return Err(FitError::Rotary { rotary_dim, wide: k.wide() });
        }
    }
    Ok(Setting { scale, skew, rope })
}

/// Mean skew KL and mean KL over rows and query heads.
fn measure(student: &Student, teachers: &[Teacher], setting: &Setting) -> (f64, f64) {
    let add =
        |a: Loss, b: Loss| Loss { kl: a.kl + b.kl, skew_kl: a.skew_kl + b.skew_kl, rows: a.rows + b.rows };
    let sum = teachers.iter().map(|t| student.loss(t, setting, false).0).fold(Loss::default(), add);
    (sum.skew_kl / sum.rows as f64, sum.kl / sum.rows as f64)
}

/// Adam's running averages for one matrix.
struct Adam {
    first: DMatrix<f64>,
    second: DMatrix<f64>,
    /// Root mean square of the initial matrix.
    size: f64,
    steps: i32,
}

impl Adam {
    fn new(matrix: &DMatrix<f64>) -> Adam {
        let (r, c) = (matrix.nrows(), matrix.ncols());
        let size = matrix.norm() / ((r * c) as f64).sqrt();
        Adam { first: DMatrix::zeros(r, c), second: DMatrix::zeros(r, c), size, steps: 0 }
    }

    fn step(&mut self, matrix: &mut DMatrix<f64>, gradient: &DMatrix<f64>, rate: f64) {
        const KEEP: (f64, f64) = (0.9, 0.999);
        self.steps += 1;
        let (a, b) = (1.0 - KEEP.0.powi(self.steps), 1.0 - KEEP.1.powi(self.steps));
        for c in 0..matrix.ncols() {
            for r in 0..matrix.nrows() {
                let (at, g) = ((r, c), gradient[(r, c)]);
                self.first[at] = KEEP.0 * self.first[at] + (1.0 - KEEP.0) * g;
                self.second[at] = KEEP.1 * self.second[at] + (1.0 - KEEP.1) * g * g;
                let down = (self.second[at] / b).sqrt() + 1e-12;
                matrix[at] -= rate * self.size * (self.first[at] / a) / down;
            }
        }
    }
}
