//! Choices compared with the formulas, computed independently.

use crate::{KINDS, SHAPES, check_weights, logits, mix, pages, plain};
use pikv::Position;
use pikv::router::{
    Biased, CacheAware, EntropyPenalised, Hashed, Hierarchical, LoadBalanced, Misses, PageFeedback,
    RouteError, Router, Routes, Shape, Start, TopK,
};

/// The formula in f64, with state of its own.
struct Oracle {
    alpha: f64,
    lambda: f64,
    beta: f64,
    cap: Option<f64>,
    ema: f64,
    count_misses: bool,
    mu: Vec<f64>,
    m: Vec<f64>,
    /// The averages that tokens are ranked by, and the same including the tokens since the last feedback.
    h: [Vec<f64>; 2],
    choices: Vec<f64>,
}

impl Oracle {
    fn new(experts: usize) -> Oracle {
        Oracle {
            alpha: 0.0,
            lambda: 0.0,
            beta: 0.0,
            cap: None,
            ema: 0.9,
            count_misses: false,
            mu: vec![1.0; experts],
            m: vec![0.0; experts],
            h: [vec![0.5; experts], vec![0.5; experts]],
            choices: vec![0.0; experts],
        }
    }

    fn scores(&self, x: &[f32]) -> Vec<f64> {
        let mean = self.mu.iter().sum::<f64>() / x.len() as f64;
        let score = |e: usize| {
            let bias = self.alpha * (self.mu[e] - mean)
                + self.lambda * (1.0 + self.m[e]).ln()
                + self.beta * self.h[0][e];
            f64::from(x[e]) - self.cap.map_or(bias, |cap| bias.clamp(-cap, cap))
        };
        (0..x.len()).map(score).collect()
    }

    /// A token that was routed.
    fn see(&mut self, x: &[f32]) {
        for (h, p) in self.h[1].iter_mut().zip(shares(x)) {
            let term = |p: f64| if p > 0.0 { -p * p.ln() } else { 0.0 };
            *h = self.ema * *h + (1.0 - self.ema) * (term(p) + term(1.0 - p)) / 2f64.ln();
        }
    }

    fn observe(&mut self, wanted: &[u32], missed: &[u32]) {
        self.h[0] = self.h[1].clone();
        let total: f64 = self.choices.iter().sum();
        for e in 0..self.mu.len() {
            let share = self.mu.len() as f64 * self.choices[e] / total;
            self.mu[e] = self.ema * self.mu[e] + (1.0 - self.ema) * share;
            self.choices[e] = 0.0;
            if self.count_misses {
                self.m[e] = self.ema * self.m[e] + f64::from(missed[e]);
            } else if wanted[e] > 0 {
                let rate = f64::from(missed[e]) / f64::from(wanted[e]);
                self.m[e] = self.ema * self.m[e] + (1.0 - self.ema) * rate;
            }
        }
    }
}

/// The softmax of a row.
fn shares(x: &[f32]) -> Vec<f64> {
    let top = f64::from(x.iter().copied().fold(f32::MIN, f32::max));
    let e: Vec<f64> = x.iter().map(|x| (f64::from(*x) - top).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| e / sum).collect()
}

/// Runs `router` and `oracle` side by side: every choice is the best by the oracle's scores up to rounding, and the model's is the
/// exact top-k (or the filing, if `follows`).
fn check_biased(mut router: Biased, mut oracle: Oracle, follows: bool, what: &str) {
    let Shape { experts, top_k, .. } = router.shape();
    let (experts, top_k) = (experts as usize, top_k as usize);
    for step in 0..25 {
        let x = logits(step as usize % KINDS, step, 5, experts);
        let mut routes = Routes::default();
        router.route(Position(0), &x, &mut routes).unwrap();
        let (model, filing) = (routes.model(), routes.filing());
        for (row, x) in x.chunks(experts).enumerate() {
            let at = row * top_k..(row + 1) * top_k;
            let chosen = &filing.experts[at.clone()];
            let want = oracle.scores(x);
            oracle.see(x);
            let score = |e: &u16| want[usize::from(*e)];
            let slack = |s: f64| 2e-5 + 3e-7 * s.abs();
            for pair in chosen.windows(2) {
                let (a, b) = (score(&pair[0]), score(&pair[1]));
                assert!(a >= b - slack(a), "{what}, step {step}: {pair:?} have {a} and {b}");
            }
            let last = score(chosen.last().unwrap());
            for e in (0..experts as u16).filter(|e| !chosen.contains(e)) {
                assert!(score(&e) <= last + slack(last), "{what}, step {step}: {e} was left out");
            }
            let mut set = chosen.to_vec();
            set.sort_unstable();
            set.dedup();
            assert_eq!(set.len(), top_k);
            check_weights(x, chosen, &filing.weights[at.clone()]);
            if follows {
                assert_eq!(model.experts[at.clone()], *chosen);
                assert_eq!(model.weights[at.clone()], filing.weights[at]);
            } else {
                assert_eq!(model.experts[at.clone()], plain(x, top_k));
                check_weights(x, &plain(x, top_k), &model.weights[at]);
            }
        }
        for e in &filing.experts {
            oracle.choices[usize::from(*e)] += 1.0;
        }
        let (wanted, missed) = pages(step, experts);
        router.observe(&PageFeedback::new(&wanted, &missed)).unwrap();
        oracle.observe(&wanted, &missed);
        let averages =
            [(router.load(), &oracle.mu), (router.miss(), &oracle.m), (router.entropy(), &oracle.h[0])];
        for (got, want) in averages {
            for (got, want) in got.iter().zip(want) {
                assert!((f64::from(*got) - want).abs() <= 1e-5 * want.max(1.0), "{what}: {got}, {want}");
            }
        }
    }
}

#[test]
fn biased_routers_follow_the_formula() {
    for (experts, top_k) in SHAPES {
        let shape = Shape::new(experts, top_k);
        let new = || Oracle::new(experts as usize);
        check_biased(TopK.router(shape).unwrap(), new(), false, "R_T");
        for (alpha, cap) in [(0.1, None), (5.0, None), (5.0, Some(0.5))] {
            let router = LoadBalanced::default().alpha(alpha).cap(cap).router(shape).unwrap();
            let oracle = Oracle { alpha: alpha.into(), cap: cap.map(f64::from), ..new() };
            check_biased(router, oracle, false, "R_LB");
        }
        for (lambda, cap, misses, model_choice) in [
            (0.05, Some(1.0), Misses::Rate, false),
            (4.0, None, Misses::Rate, false),
            (4.0, Some(0.25), Misses::Rate, true),
            (0.05, Some(1.0), Misses::Count, false),
        ] {
            let options =
                CacheAware::default().lambda(lambda).misses(misses).cap(cap).model_choice(model_choice);
            let count_misses = misses == Misses::Count;
            let oracle = Oracle { lambda: lambda.into(), cap: cap.map(f64::from), count_misses, ..new() };
            check_biased(options.router(shape).unwrap(), oracle, model_choice, "R_P");
        }
        for (beta, ema, cap) in [(0.1, 0.9, None), (5.0, 0.5, None), (5.0, 0.9, Some(0.25))] {
            let router = EntropyPenalised::default().beta(beta).ema(ema).cap(cap).router(shape).unwrap();
            let oracle = Oracle { beta: beta.into(), ema: ema.into(), cap: cap.map(f64::from), ..new() };
            check_biased(router, oracle, false, "R_E");
        }
    }
}

#[test]
fn top_k_is_exact_and_files_as_the_model_does() {
    for (experts, top_k) in SHAPES {
        let mut router = TopK.router(Shape::new(experts, top_k)).unwrap();
        for kind in 0..KINDS {
            let x = logits(kind, 3, 4, experts as usize);
            let mut routes = Routes::default();
            router.route(Position(0), &x, &mut routes).unwrap();
            let want: Vec<u16> = x.chunks(experts as usize).flat_map(|x| plain(x, top_k as usize)).collect();
            assert_eq!(routes.filing().experts, want);
            assert_eq!(routes.model(), routes.filing());
            assert_eq!(routes.fetch(), top_k as usize);
        }
    }
}

#[test]
fn hierarchical_stays_in_the_best_groups() {
    for (experts, top_k, groups, kept, best) in [
        (8, 2, 4, 1, 1),
        (8, 2, 4, 2, 2),
        (64, 6, 8, 3, 2),
        (64, 6, 8, 3, 1),
        (1000, 3, 8, 1, 1),
        (64, 4, 16, 7, 4),
    ] {
        let options = Hierarchical::default().groups(groups).kept(kept).best(best);
        let mut router = options.router(Shape::new(experts, top_k)).unwrap();
        let size = (experts / groups) as usize;
        for kind in 0..KINDS {
            let x = logits(kind, 9, 5, experts as usize);
            let mut routes = Routes::default();
            router.route(Position(0), &x, &mut routes).unwrap();
            for (row, x) in x.chunks(experts as usize).enumerate() {
                // Shares that f32 can not hold are 0.
                let share: Vec<f64> =
                    shares(x).into_iter().map(|p| if p < 1.2e-38 { 0.0 } else { p }).collect();
                let of_groups: Vec<f32> = share
                    .chunks(size)
                    .map(|group| {
                        let mut group = group.to_vec();
                        group.sort_by(|a, b| b.partial_cmp(a).unwrap());
                        group[..best as usize].iter().sum::<f64>() as f32
                    })
                    .collect();
                let kept = plain(&of_groups, kept as usize);
                let inside: Vec<f32> = x
                    .iter()
                    .enumerate()
                    .map(|(e, x)| if kept.contains(&((e / size) as u16)) { *x } else { f32::NEG_INFINITY })
                    .collect();
                let at = row * top_k as usize..(row + 1) * top_k as usize;
                let chosen = &routes.filing().experts[at.clone()];
                assert_eq!(chosen, plain(&inside, top_k as usize));
                check_weights(x, chosen, &routes.filing().weights[at.clone()]);
                assert_eq!(routes.model().experts[at], plain(x, top_k as usize));
            }
        }
    }
}

#[test]
fn hashed_experts_are_the_formula_and_distinct() {
    for (experts, top_k) in SHAPES {
        let shape = Shape::new(experts, top_k);
        for stride in 0..70 {
            let distinct =
                (0..top_k).map(|j| j * stride % experts).collect::<std::collections::HashSet<_>>().len();
            for start in [Start::Hash, Start::RoundRobin] {
                let router = Hashed::default().start(start).stride(stride).router(shape);
                let Ok(mut router) = router else {
                    let err = router.unwrap_err();
                    assert!(distinct < top_k as usize, "{err}");
                    assert!(matches!(err, RouteError::Stride { stride: s, .. } if s == stride));
                    continue;
                };
                assert_eq!(distinct, top_k as usize);
                let first = 1000 + stride;
                let x = logits(0, 1, 3, experts as usize);
                let mut routes = Routes::default();
                router.route(Position(first), &x, &mut routes).unwrap();
                for (i, e) in routes.filing().experts.iter().enumerate() {
                    let (t, j) =
                        (u64::from(first) + i as u64 / u64::from(top_k), i as u64 % u64::from(top_k));
                    let start = if start == Start::Hash { mix(t) } else { t };
                    // Wider than the router's own arithmetic.
                    let want = (u128::from(start) + u128::from(j) * u128::from(stride)) % u128::from(experts);
                    assert_eq!(u128::from(*e), want);
                }
                for (row, x) in x.chunks(experts as usize).enumerate() {
                    let at = row * top_k as usize..(row + 1) * top_k as usize;
                    check_weights(
                        x,
                        &routes.filing().experts[at.clone()],
                        &routes.filing().weights[at.clone()],
                    );
                    assert_eq!(routes.model().experts[at], plain(x, top_k as usize));
                }
            }
        }
    }
    // The hash spreads: 64k positions over 64 experts, each within 12 % of the mean.
    let mut router = Hashed::default().router(Shape::new(64, 1)).unwrap();
    let mut routes = Routes::default();
    router.route(Position(0), &vec![0.0; 64 << 16], &mut routes).unwrap();
    let mut counts = [0i32; 64];
    routes.filing().experts.iter().for_each(|e| counts[usize::from(*e)] += 1);
    assert!(counts.iter().all(|n| (n - 1024).abs() < 123), "{counts:?}");
}
