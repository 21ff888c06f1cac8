//! Channels cropped and pruned, compared with an exhaustive search.

use super::*;
use pikv_core::rope::{Pairs, Rope};

fn rope(rotary_dim: u32, pairs: Pairs) -> Rope {
    Rope::new(1e4, rotary_dim).pairs(pairs)
}

/// The best score of all sets of `keep` channels that hold whole pairs.
fn best_crop(wide: usize, keep: u32, rope: Option<Rope>, score: &dyn Fn(&[usize]) -> f64) -> Option<f64> {
    let pairs: Vec<(usize, usize)> =
        rope.iter().flat_map(|r| (0..r.rotary_dim as usize / 2).map(|i| r.pair(i))).collect();
    let sets = (0u32..1 << wide).filter(|s| s.count_ones() == keep);
    let whole = sets.filter(|s| pairs.iter().all(|(a, b)| (s >> a) & 1 == (s >> b) & 1));
    let left = |s: u32| -> Vec<usize> { (0..wide).filter(|c| (s >> c) & 1 == 0).collect() };
    whole.map(|s| score(&left(s))).min_by(f64::total_cmp)
}

#[test]
fn crops_and_prunings_beat_every_other_choice() {
    for seed in 0..12u64 {
        let wide = 5 + seed as usize % 5;
        let of =
            |s: u64| -> Vec<f64> { noise(seed * 7 + s, wide).iter().map(|x| f64::from(x * x)).collect() };
        let (q, k) = (of(1), of(2));
        let ropes = [
            None,
            Some(rope(4, Pairs::Halves)),
            Some(rope(wide as u32 & !1, Pairs::Halves)),
            Some(rope(4, Pairs::Neighbours)),
        ];
        for rope in ropes {
            let partner = |c: usize| {
                let mut pairs = rope.iter().flat_map(|r| (0..r.rotary_dim as usize / 2).map(|i| r.pair(i)));
                pairs.find_map(|(a, b)| if a == c { Some(b) } else { (b == c).then_some(a) })
            };
            let energy = |left: &[usize]| left.iter().map(|c| k[*c]).sum::<f64>();
            // A pair's two channels have their mean, as averaged over rotations.
            let even = |x: &[f64], c: usize| partner(c).map_or(x[c], |p| (x[c] + x[p]) / 2.0);
            let product = |left: &[usize]| left.iter().map(|c| even(&q, *c) * even(&k, *c)).sum::<f64>();
            for keep in 0..=wide as u32 + 1 {
                let crops = [crop(&k, rope, keep, CropBy::Energy), think(&q, &k, rope, keep)];
                for (found, score) in crops.into_iter().zip([&energy as &dyn Fn(&[usize]) -> f64, &product]) {
                    match (found, best_crop(wide, keep, rope, score).filter(|_| keep > 0)) {
                        (Ok(found), Some(best)) => {
                            assert!((found.tail - best).abs() < 1e-12, "{seed} {rope:?} {keep}");
                            let kept = |c: &usize| found.channels.contains(&(*c as u32));
                            let left: Vec<usize> = (0..wide).filter(|c| !kept(c)).collect();
                            assert!((score(&left) - best).abs() < 1e-12);
                            assert!((0..wide).all(|c| partner(c).is_none_or(|p| kept(&c) == kept(&p))));
                            assert_eq!(found.map.channels(), Some(&found.channels[..]));
                            assert!(found.channels.is_sorted() && found.channels.len() == keep as usize);
                        }
                        (Err(FitError::Keep { .. }), None) => {}
                        other => panic!("{seed} {rope:?} {keep}: {other:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn the_first_channels_and_ties() {
    let first = |keep, rope| crop(&[1.0; 10], rope, keep, CropBy::First).map(|c| (c.channels, c.tail));
    assert_eq!(first(3, None), Ok((vec![0, 1, 2], 7.0)));
    assert_eq!(first(4, Some(rope(10, Pairs::Halves))), Ok((vec![0, 1, 5, 6], 6.0)));
    assert_eq!(first(5, Some(rope(8, Pairs::Halves))), Ok((vec![0, 1, 4, 5, 8], 5.0)));
    assert_eq!(first(9, Some(rope(8, Pairs::Halves))), Ok((vec![0, 1, 2, 3, 4, 5, 6, 7, 8], 1.0)));
    assert_eq!(first(4, Some(rope(8, Pairs::Neighbours))), Ok((vec![0, 1, 2, 3], 6.0)));
    let said = first(3, Some(rope(10, Pairs::Halves))).unwrap_err().to_string();
    assert!(said.ends_with("2 or 4 would do"), "{said}");
    let said = first(1, Some(rope(10, Pairs::Halves))).unwrap_err().to_string();
    assert!(said.ends_with(": 2 would do"), "{said}");
    let said = first(99, Some(rope(8, Pairs::Halves))).unwrap_err().to_string();
    assert!(said.ends_with(": 10 would do"), "{said}");
    for rotary in [0, 1, 3, 12] {
        assert!(matches!(first(2, Some(rope(rotary, Pairs::Halves))), Err(FitError::Rotary { .. })));
    }
    let even = think(&[1.0; 6], &[1.0; 6], None, 2).unwrap();
    assert_eq!((even.channels, even.tail), (vec![0, 1], 4.0));
    for bad in [f64::NAN, f64::INFINITY, -1.0] {
        assert!(matches!(crop(&[1.0, bad], None, 1, CropBy::First), Err(FitError::Energy { index: 1, .. })));
        assert!(
            think(&[1.0, bad], &[1.0; 2], None, 1).is_err()
                && think(&[1.0; 2], &[1.0, bad], None, 1).is_err()
        );
    }
    assert!(think(&[1.0; 3], &[1.0; 2], None, 1).is_err() && crop(&[], None, 0, CropBy::First).is_err());
}

/// The tail of a crop is the error of its rows; a crop does not hold memory of the dropped channels.
#[test]
fn a_crops_tail_is_its_residual() {
    let rows = noise(77, 50 * 12);
    let mut moments = Moments::new(12).unwrap();
    moments.observe(&rows).unwrap();
    let cropped = crop(&moments.energy(), Some(rope(8, Pairs::Halves)), 7, CropBy::Energy).unwrap();
    let mut lost = 0.0;
    for row in rows.chunks(12) {
        let (mut stored, mut back) = ([0.0; 7], [0.0; 12]);
        cropped.map.encode_row(row, &mut stored);
        cropped.map.decode_row(&stored, &mut back);
        lost += row.iter().zip(back).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    }
    assert!((cropped.tail / lost - 1.0).abs() < 1e-6);
    assert!((moments.residual(&cropped.map).unwrap() / lost - 1.0).abs() < 1e-6);
}
