//! Choices of tokens to keep, compared with slow forms of their definitions.

use pikv::codec::SelectError;
use pikv::policy::{ChunkKv, FastV, PyramidKv};
use proptest::prelude::*;

proptest! {
    #[test]
    fn chunks_by_a_slow_choice(scores in prop::collection::vec(-4i8..4, 0..40), chunk in 1u32..6, budget in 0u32..50) {
        let scores: Vec<f32> = scores.into_iter().map(|s| f32::from(s) / 2.0).collect();
        let n = scores.len();
        let got = ChunkKv::new(chunk, budget).keep(&scores);
        if (budget as usize) < n.min(chunk as usize) {
            let refused = matches!(got, Err(SelectError::Setting { name: "budget", .. }));
            prop_assert!(refused);
            return Ok(());
        }
        let mut keep = vec![false; n];
        let mut left = budget as usize;
        let mut open: Vec<Vec<usize>> = (0..n).collect::<Vec<_>>().chunks(chunk as usize).map(<[usize]>::to_vec).collect();
        while !open.is_empty() {
            let mean = |c: &[usize]| c.iter().map(|t| f64::from(scores[*t])).sum::<f64>() / c.len() as f64;
            let mut best = 0;
            for i in 1..open.len() {
                if mean(&open[i]) > mean(&open[best]) { best = i }
            }
            let taken = open.remove(best);
            if taken.len() <= left {
                left -= taken.len();
                taken.into_iter().for_each(|t| keep[t] = true);
            }
        }
        prop_assert_eq!(got.unwrap(), keep);
    }

    #[test]
    fn fastv_by_counting(scores in prop::collection::vec(0u8..6, 0..60), ratio in 0.0f64..1.0, sinks in 0u32..8, window in 0u32..8, layer in 0u32..5) {
        let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
        let n = scores.len();
        let got = FastV::new(ratio).sinks(sinks).window(window).keep(layer, &scores).unwrap();
        let open: Vec<usize> = (sinks as usize..n.saturating_sub(window as usize)).collect();
        let drop = if layer < 2 { 0 } else { (ratio * open.len() as f64) as usize };
        for t in 0..n {
            // Number of tokens dropped before t: the less attended, and of equals the newer.
            let before = open.iter().filter(|o| scores[**o] < scores[t] || (scores[**o] == scores[t] && **o > t)).count();
            prop_assert_eq!(got[t], !(open.contains(&t) && before < drop), "token {}", t);
        }
    }

    #[test]
    fn pyramids_add_up(layers in 1u32..130, capacity in 1u32..5000, window in 0u32..64, beta in 1.0f64..40.0, scores in prop::collection::vec(0u8..9, 0..80), at in any::<prop::sample::Index>()) {
        let pyramid = PyramidKv::new(capacity).window(window).beta(beta);
        if capacity <= window {
            prop_assert_eq!(pyramid.budgets(layers), Err(SelectError::Capacity { capacity, window }));
            return Ok(());
        }
        let (shares, budgets) = (pyramid.shares(layers).unwrap(), pyramid.budgets(layers).unwrap());
        prop_assert!((shares.iter().sum::<f64>() / f64::from(layers) - f64::from(capacity)).abs() < 1e-3);
        prop_assert_eq!(budgets.iter().map(|b| u64::from(*b)).sum::<u64>(), u64::from(layers) * u64::from(capacity));
        for (l, (share, budget)) in shares.iter().zip(&budgets).enumerate() {
            prop_assert!((share - f64::from(*budget)).abs() <= 1.0 && *budget >= window);
            if layers > 1 {
                let (c, w) = (f64::from(capacity), f64::from(window));
                let least = (c - w) / beta;
                let most = 2.0 * (c - w) - least;
                let want = most - l as f64 * (most - least) / f64::from(layers - 1) + w;
                prop_assert!((share - want).abs() < 1e-9 * c);
            }
        }
        let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
        let (n, layer) = (scores.len(), at.index(layers as usize));
        let budget = pyramid.budgets_of(layers, n as u32).unwrap()[layer].saturating_sub(window);
        let keep = pyramid.keep(layer as u32, layers, &scores).unwrap();
        let old = n.saturating_sub(window as usize);
        for t in 0..n {
            let ahead = (0..old).filter(|o| scores[*o] > scores[t] || (scores[*o] == scores[t] && *o < t)).count();
            prop_assert_eq!(keep[t], t >= old || ahead < budget as usize);
        }
    }
}

#[test]
fn pyramid_budgets_of_real_depths() {
    for layers in [4u32, 32, 64, 128] {
        for capacity in [9, 64, 128, 2048] {
            let pyramid = PyramidKv::new(capacity);
            let budgets = pyramid.budgets(layers).unwrap();
            assert_eq!(budgets.iter().sum::<u32>(), layers * capacity);
            assert!(budgets.windows(2).all(|b| b[0] >= b[1]));
            let mean = pyramid.shares(layers).unwrap().iter().sum::<f64>() / f64::from(layers);
            assert!((mean - f64::from(capacity)).abs() < 1e-3);
        }
    }
    assert_eq!(PyramidKv::new(77).budgets(1).unwrap(), [77]);
    assert_eq!(PyramidKv::new(10).window(2).beta(1.0).budgets(3).unwrap(), [10, 10, 10]);
    assert!(PyramidKv::new(77).beta(0.5).budgets(4).is_err());
    assert!(PyramidKv::new(77).beta(f64::NAN).budgets(4).is_err());
    assert!(PyramidKv::new(77).budgets(0).is_err());
    assert!(PyramidKv::new(u32::MAX).budgets(4).is_err());
    let said = PyramidKv::new(8).budgets(4).unwrap_err().to_string();
    assert_eq!(said, "a capacity of 8 tokens a layer with a window of 8; it must be more than the window");
    assert!(PyramidKv::new(77).keep(4, 4, &[]).is_err());
}

#[test]
fn scores_that_are_no_numbers_are_refused() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let scores = [0.5, 0.25, bad];
        let refused =
            |r: Result<Vec<bool>, SelectError>| matches!(r, Err(SelectError::Score { token: 2, .. }));
        assert!(refused(ChunkKv::new(2, 2).keep(&scores)));
        assert!(refused(FastV::new(0.5).keep(0, &scores)));
        assert!(refused(PyramidKv::new(16).keep(0, 2, &scores)));
    }
    assert!(FastV::new(1.0).keep(2, &[0.5]).is_err() && FastV::new(f64::NAN).keep(2, &[0.5]).is_err());
    assert!(ChunkKv::new(0, 2).keep(&[0.5]).is_err());
    // Zeros of both signs are one score.
    let keep = ChunkKv::new(1, 1).keep(&[-0.0, 0.0]).unwrap();
    assert_eq!(keep, [true, false]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// All layers together keep as many tokens as were asked for, whenever the prompt has them.
    #[test]
    fn a_pyramid_keeps_what_was_asked_for(
        layers in 1u32..40, capacity in 1u32..300, window in 0u32..32, beta in 1.0f64..40.0, tokens in 0u32..600,
    ) {
        prop_assume!(capacity > window);
        let pyramid = PyramidKv::new(capacity).window(window).beta(beta);
        let scores = pikv_test::numbers::noise(u64::from(tokens), tokens as usize);
        let keep = |layer| pyramid.keep(layer, layers, &scores).unwrap().iter().filter(|keep| **keep).count() as u32;
        let kept: Vec<u32> = (0..layers).map(keep).collect();
        prop_assert_eq!(kept.iter().sum::<u32>(), layers * capacity.min(tokens));
        prop_assert!(kept.iter().all(|kept| *kept >= window.min(tokens)));
        prop_assert!(kept.is_sorted_by(|a, b| a >= b), "{:?}", kept);
    }
}
