//! Means of tokens and their errors, and values that are refused.

use super::*;

#[test]
fn values_that_are_no_numbers_are_refused() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(pyramid(&[0.5, 0.25, bad], 1, 2).is_err());
    }
    let head = |importance, error| [HeadCodings::new(importance, vec![Cost::new(1, error)])];
    for bad in [f64::NAN, f64::INFINITY, -1.0] {
        assert!(hybrid(&head(bad, 1.0), 9).is_err() && hybrid(&head(1.0, bad), 9).is_err());
    }
    assert!(hybrid(&[HeadCodings::new(1.0, vec![])], 9).is_err());
    assert_eq!(hybrid(&head(1.0, 1.0), 0), Err(SelectError::Budget { budget: 0, needed: 1 }));
}

#[test]
fn the_pyramid_in_the_letter_and_its_bound() {
    for (tokens, dim, levels) in [(1, 3, 2), (8, 4, 3), (13, 5, 4), (32, 2, 31), (0, 2, 1)] {
        let rows = noise(tokens as u64, tokens * dim);
        let found = pyramid(&rows, dim, levels).unwrap();
        let mut bound = 0.0;
        for l in 0..levels {
            // P_l as a matrix over tokens.
            let run = 1usize << (l + 1);
            let weight = |t: usize, u: usize| {
                let (start, end) = (t / run * run, tokens.min((t / run + 1) * run));
                if (start..end).contains(&u) { 1.0 / (end - start) as f64 } else { 0.0 }
            };
            let rebuilt = found.reconstruct(l).unwrap();
            let mut lost = 0.0;
            for t in 0..tokens {
                for c in 0..dim {
                    let mean: f64 = (0..tokens).map(|u| weight(t, u) * f64::from(rows[u * dim + c])).sum();
                    lost += (mean - f64::from(rows[t * dim + c])).powi(2);
                    assert!((mean - f64::from(rebuilt[t * dim + c])).abs() < 1e-7);
                }
            }
            assert!((lost - found.lost[l as usize]).abs() <= 1e-12 * (1.0 + lost));
            assert_eq!(found.levels[l as usize].len(), tokens.div_ceil(run) * dim);
            bound += lost / 4f64.powi(l as i32);
        }
        assert!((bound - found.bound()).abs() <= 1e-12 * (1.0 + bound));
        for (l, lost) in found.lost.iter().enumerate() {
            assert!(*lost <= found.bound() * 4f64.powi(l as i32) * (1.0 + 1e-12));
        }
    }
    assert!(pyramid(&[1.0; 6], 3, 0).is_err() && pyramid(&[1.0; 6], 3, 32).is_err());
    assert!(pyramid(&[1.0; 7], 3, 1).is_err() && pyramid(&[1.0; 6], 0, 1).is_err());
    assert!(pyramid(&[1.0; 6], 3, 1).unwrap().reconstruct(1).is_err());
}
