//! A coding for each head, compared with an exhaustive search.

use super::*;
use proptest::prelude::*;

fn cost(heads: &[HeadCodings], chosen: &[usize]) -> (u64, f64) {
    let picked = || heads.iter().zip(chosen).map(|(h, i)| (h.importance, h.codings[*i]));
    (picked().map(|(_, c)| c.bytes).sum(), picked().map(|(i, c)| i * c.error).sum())
}

/// The least error of all choices within the budget.
fn every(heads: &[HeadCodings], budget: u64) -> Option<f64> {
    let mut choices = vec![vec![]];
    for head in heads {
        choices = choices
            .iter()
            .flat_map(|c: &Vec<usize>| (0..head.codings.len()).map(move |i| [&c[..], &[i]].concat()))
            .collect();
    }
    let errors = choices.iter().map(|c| cost(heads, c)).filter(|(bytes, _)| *bytes <= budget);
    errors.map(|(_, error)| error).min_by(f64::total_cmp)
}

proptest! {
    #[test]
    fn hybrid_against_every_choice(
        heads in prop::collection::vec((0u8..4, prop::collection::vec((0u64..12, 0u32..40), 1..4)), 0..5),
        budget in 0u64..50,
    ) {
        let heads: Vec<HeadCodings> = heads.into_iter().map(|(importance, codings)| HeadCodings::new(f64::from(importance) / 2.0, codings.into_iter().map(|(bytes, error)| Cost::new(bytes, f64::from(error))).collect())).collect();
        let best = every(&heads, budget);
        match hybrid(&heads, budget) {
            Ok(found) => {
                let best = best.unwrap();
                let (bytes, error) = cost(&heads, &found.chosen);
                prop_assert_eq!(bytes, found.bytes);
                prop_assert!(bytes <= budget && (error - found.error).abs() < 1e-9);
                prop_assert!(found.bound <= best + 1e-9 && best <= found.error + 1e-9, "{:?} {}", found, best);
            }
            Err(e) => { prop_assert!(best.is_none(), "{}", e); }
        }
    }

    #[test]
    fn hybrid_is_exact_on_convex_codings_in_equal_steps(
        heads in prop::collection::vec((1u8..5, prop::collection::vec(0u32..9, 1..5)), 1..5), budget in 0u64..60,
    ) {
        // Gains that fall from step to step of 3 bytes.
        let heads: Vec<HeadCodings> = heads.into_iter().map(|(importance, mut gains)| {
            gains.sort_unstable();
            let mut error = 0.0;
            let mut codings = vec![Cost::new(3 * gains.len() as u64, error)];
            for (i, gain) in gains.iter().enumerate() {
                error += f64::from(*gain);
                codings.push(Cost::new(3 * (gains.len() - 1 - i) as u64, error));
            }
            HeadCodings::new(f64::from(importance), codings)
        }).collect();
        prop_assert_eq!(hybrid(&heads, budget).unwrap().error, every(&heads, budget).unwrap());
    }
}
