//! The linear system of an arm of the bandit.

/// Added to the diagonal: the matrix of an unplayed arm is the identity.
const RIDGE: f64 = 1.0;

/// Solves `(gram + RIDGE) y = x` by Cholesky; `gram` is a lower triangle. `None` if the matrix is not positive definite.
pub(super) fn solve(gram: &[f64; 6], x: [f64; 3]) -> Option<[f64; 3]> {
    let at = |i: usize, j: usize| i * (i + 1) / 2 + j;
    let mut l = *gram;
    for i in 0..3 {
        l[at(i, i)] += RIDGE;
        for j in 0..=i {
            let mut s = l[at(i, j)];
            for k in 0..j {
                s -= l[at(i, k)] * l[at(j, k)];
            }
            if i > j {
                l[at(i, j)] = s / l[at(j, j)];
            } else if s > 0.0 && s.is_finite() {
                l[at(i, i)] = s.sqrt();
            } else {
                return None;
            }
        }
    }
    let mut y = x;
    for i in 0..3 {
        for k in 0..i {
            y[i] -= l[at(i, k)] * y[k];
        }
        y[i] /= l[at(i, i)];
    }
    for i in (0..3).rev() {
        for k in i + 1..3 {
            y[i] -= l[at(k, i)] * y[k];
        }
        y[i] /= l[at(i, i)];
    }
    Some(y)
}
