//! Eigenvectors of a small symmetric matrix, with the same bits on every machine.

/// Most sweeps. Once the off-diagonal entries are small, each sweep squares them; 6 to 8 sweeps suffice for 32 rows.
const SWEEPS: usize = 30;

/// Diagonalises the symmetric `matrix`, `[n][n]`, by plane rotations, row by row, and returns the eigenvectors, a row each, in the order
/// of the diagonal. All in f64, in a fixed order. O(n^3) a sweep.
pub(super) fn diagonal(matrix: &mut [f64], n: usize) -> Vec<f64> {
    let mut vectors = vec![0.0; n * n];
    (0..n).for_each(|i| vectors[i * n + i] = 1.0);
    let trace: f64 = (0..n).map(|i| matrix[i * n + i].abs()).sum();
    for _ in 0..SWEEPS {
        let mut turned = false;
        for p in 0..n {
            for q in p + 1..n {
                let off = matrix[p * n + q];
                if off.abs() <= trace * 1e-17 {
                    continue;
                }
                turned = true;
                // The smaller of the two angles whose rotation makes the entry 0.
                let theta = (matrix[q * n + q] - matrix[p * n + p]) / (2.0 * off);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let cos = 1.0 / (t * t + 1.0).sqrt();
                let sin = t * cos;
                rotate(matrix, n, p, q, cos, sin);
                for i in 0..n {
                    let (a, b) = (matrix[i * n + p], matrix[i * n + q]);
                    (matrix[i * n + p], matrix[i * n + q]) = (cos * a - sin * b, sin * a + cos * b);
                }
                (matrix[p * n + q], matrix[q * n + p]) = (0.0, 0.0);
                rotate(&mut vectors, n, p, q, cos, sin);
            }
        }
        if !turned {
            break;
        }
    }
    vectors
}

/// Rotates rows `p` and `q`, with `p < q`.
fn rotate(matrix: &mut [f64], n: usize, p: usize, q: usize, cos: f64, sin: f64) {
    let (first, second) = matrix.split_at_mut(q * n);
    for (a, b) in first[p * n..(p + 1) * n].iter_mut().zip(&mut second[..n]) {
        (*a, *b) = (cos * *a - sin * *b, sin * *a + cos * *b);
    }
}

#[cfg(test)]
mod tests {
    use super::diagonal;

    #[test]
    fn eigenvectors_of_any_matrix() {
        for n in [1usize, 2, 5, 32] {
            for rank in [1, 3, n] {
                let x = |i: usize, k: usize| ((i * 37 + k * 101 + i * i * 7) % 23) as f64 - 11.0;
                let at = |i: usize, j: usize| (0..rank).map(|k| x(i, k) * x(j, k)).sum::<f64>();
                let matrix: Vec<f64> = (0..n * n).map(|i| at(i / n, i % n)).collect();
                let mut turned = matrix.clone();
                let vectors = diagonal(&mut turned, n);
                let most = matrix.iter().fold(1.0f64, |m, x| m.max(x.abs()));
                for (i, v) in vectors.chunks(n).enumerate() {
                    for j in 0..n {
                        let product: f64 = (0..n).map(|c| matrix[j * n + c] * v[c]).sum();
                        assert!((product - turned[i * n + i] * v[j]).abs() < 1e-12 * most * n as f64);
                        let w = &vectors[j * n..(j + 1) * n];
                        let dot: f64 = v.iter().zip(w).map(|(a, b)| a * b).sum();
                        assert!(
                            (dot - f64::from(u8::from(i == j))).abs() < 1e-13,
                            "{n} {rank}: {i} {j} {dot}"
                        );
                    }
                }
            }
        }
    }
}
