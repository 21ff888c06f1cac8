//! Scores and top-k against plain scalar code.

use pikv_core::hash::{mix, next};
use pikv_core::math;
use pikv_core::portable::Portable;
use pikv_core::score::{
    Bias, Coefficients, Groups, MAX_EXPERTS, Ranking, binary_entropy, groups, load, penalties, route, rows,
    scores, softmax, span, take, top_k, weights,
};
use pikv_core::warp::LANES;

const SIZES: [usize; 12] = [1, 2, 3, 8, 31, 32, 33, 64, 100, 256, 1000, 1024];

/// `$e` with `$R` rows enough for `$experts`.
macro_rules! with_rows {
    ($experts:expr, $R:ident => $e:expr) => {
        match rows($experts) {
            1 => {
                const $R: usize = 1;
                $e
            }
            2..=4 => {
                const $R: usize = 4;
                $e
            }
            _ => {
                const $R: usize = 32;
                $e
            }
        }
    };
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        (next(&mut self.0) % n as u64) as usize
    }
    /// In [-1, 1).
    fn unit(&mut self) -> f32 {
        (next(&mut self.0) >> 40) as f32 / 8_388_608.0 - 1.0
    }
    fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
}

/// Inputs that break a careless top-k: ties, both orders, both zeros, the extremes of f32.
fn adversaries(experts: usize) -> Vec<Vec<f32>> {
    let mut random = Random(experts as u64);
    let mut all = vec![
        vec![0.0; experts],
        vec![-3.5; experts],
        vec![f32::MAX; experts],
        vec![f32::MIN; experts],
        (0..experts).map(|e| e as f32).collect(),
        (0..experts).map(|e| -(e as f32)).collect(),
        (0..experts).map(|e| if e % 2 == 0 { -0.0 } else { 0.0 }).collect(),
        (0..experts).map(|e| (e % 3) as f32).collect(),
        (0..experts).map(|e| ((e / 32) % 2) as f32).collect(),
        (0..experts).map(|e| if e % 7 == 3 { f32::MIN } else { f32::MAX }).collect(),
        (0..experts).map(|e| if e + 1 == experts { 1e30 } else { -1e30 }).collect(),
        (0..experts).map(|e| f32::from_bits(e as u32 % 5)).collect(),
    ];
    for scale in [1.0, 8.0, 100.0] {
        all.push(random.values(experts, scale));
    }
    all.push((0..experts).map(|_| random.below(4) as f32).collect());
    all
}

/// The experts in `from`, best first, the lower index first among equals.
fn sorted(scores: &[f32], from: &[usize]) -> Vec<u16> {
    let mut order = from.to_vec();
    order.sort_by(|a, b| scores[*b].partial_cmp(&scores[*a]).unwrap().then(a.cmp(b)));
    order.into_iter().map(|e| e as u16).collect()
}

fn close(got: f32, want: f64, tolerance: f64) -> bool {
    (f64::from(got) - want).abs() <= tolerance * want.abs().max(1.0)
}

/// Sum over the lanes by the documented butterfly.
fn butterfly(mut lane: [f32; LANES]) -> f32 {
    for d in [16, 8, 4, 2, 1] {
        lane = std::array::from_fn(|i| lane[i] + lane[i ^ d]);
    }
    lane[0]
}

#[test]
fn mix_is_splitmix64() {
    // The first outputs of the published generator from seed 1234567.
    let mut state = 1234567;
    let want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431];
    assert_eq!([0; 4].map(|_: u64| next(&mut state)), want);
    assert_eq!(mix(1234567), want[0]);
}

#[test]
fn span_has_a_bit_for_each_expert() {
    for from in [0, 1, 31, 32, 33, 64, 100, 128] {
        for to in [0, 1, 31, 32, 33, 63, 64, 96, 127, 128, 200] {
            let bits = span::<4>(from, to);
            for e in 0..128 {
                assert_eq!(bits[e / 32] >> (e % 32) & 1 == 1, (from..to).contains(&e), "{e} of {from}..{to}");
            }
        }
    }
}

#[test]
fn top_k_is_a_stable_sort() {
    for experts in SIZES {
        for (case, scores) in adversaries(experts).iter().enumerate() {
            let all: Vec<usize> = (0..experts).collect();
            let want = sorted(scores, &all);
            for k in [1, 2, 8, experts] {
                if k > experts {
                    continue;
                }
                let mut got = vec![u16::MAX; k];
                with_rows!(experts, R => {
                    let mut live = span::<R>(0, experts);
                    top_k(Portable, &load::<_, R>(Portable, scores), &mut live, &mut got);
                    let left: u32 = live.iter().map(|bits| bits.count_ones()).sum();
                    assert_eq!(left as usize, experts - k);
                });
                assert_eq!(got, want[..k], "case {case}, {experts} experts, k {k}");
            }
        }
    }
}

#[test]
fn infinite_scores_are_taken_once_and_padding_never() {
    let x = [f32::NEG_INFINITY, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY, 0.0];
    let lanes = load::<_, 1>(Portable, &x);
    let mut live = span::<1>(0, 5);
    let taken: [_; 5] = std::array::from_fn(|_| take(Portable, &lanes, &mut live));
    assert_eq!(taken.map(|(e, _)| e), [1, 3, 4, 0, 2]);
    assert_eq!(taken.map(|(_, s)| s), [x[1], x[3], x[4], x[0], x[2]]);
    assert_eq!(live, [0]);
}

#[test]
fn penalties_are_the_formula_in_its_order() {
    let mut random = Random(7);
    for experts in SIZES {
        let mu: Vec<f32> = random.values(experts, 1.0).iter().map(|x| 1.0 + x).collect();
        let miss: Vec<f32> = random.values(experts, 1.0).iter().map(|x| x.abs() * 3.0).collect();
        let mut lanes = [0.0; LANES];
        for (e, mu) in mu.iter().enumerate() {
            lanes[e % LANES] += mu;
        }
        let mean = butterfly(lanes) / experts as f32;
        let true_mean = mu.iter().map(|x| f64::from(*x)).sum::<f64>() / experts as f64;
        assert!(close(mean, true_mean, 1e-6));
        let entropy: Vec<f32> = random.values(experts, 0.5).iter().map(|x| 0.5 + x).collect();
        for (alpha, lambda, beta) in [(0.1, 0.05, 0.1), (0.0, 2.0, 0.0), (3.0, 0.0, 7.0), (1e6, 1e6, 1e6)] {
            let c = Coefficients::new(alpha, lambda, beta);
            let none: &[f32] = &[];
            for (mu, miss, entropy) in [
                (&mu[..], &miss[..], &entropy[..]),
                (none, &miss[..], none),
                (&mu[..], none, &entropy[..]),
                (none, none, &entropy[..]),
            ] {
                let mut out = vec![[f32::NAN; LANES]; rows(experts)];
                penalties(Portable, c, experts, mu, miss, entropy, &mut out);
                for (e, got) in out.as_flattened().iter().enumerate() {
                    let mut want = mu.get(e).map_or(0.0, |mu| alpha * (mu - mean));
                    if let Some(miss) = miss.get(e) {
                        want += lambda * math::ln1(1.0 + miss);
                    }
                    if let Some(h) = entropy.get(e) {
                        want += beta * h;
                    }
                    assert_eq!(got.to_bits(), want.to_bits(), "expert {e} of {experts}");
                }
            }
        }
    }
}

#[test]
fn scores_are_logits_less_the_capped_bias() {
    let mut random = Random(11);
    for experts in SIZES {
        for case in 0..6 {
            let logits = match case {
                0 => vec![2.5; experts],
                1 => (0..experts).map(|e| if e == experts / 2 { 200.0 } else { -200.0 }).collect(),
                _ => random.values(experts, 6.0),
            };
            let fixed: Vec<f32> = random.values(experts, 2.0);
            let mut rows_of = vec![[0.0; LANES]; rows(experts)];
            rows_of.as_flattened_mut()[..experts].copy_from_slice(&fixed);
            for cap in [None, Some(0.75), Some(1.0)] {
                let bias = Bias { fixed: &rows_of, cap };
                let mut got = vec![[0.0; LANES]; rows(experts)];
                with_rows!(experts, R => {
                    let x = load::<_, R>(Portable, &logits);
                    let s = scores(Portable, &x, &span::<R>(0, experts), &bias);
                    got.copy_from_slice(&s[..rows(experts)]);
                });
                for (e, got) in got.as_flattened()[..experts].iter().enumerate() {
                    let mut b = f64::from(fixed[e]);
                    if let Some(cap) = cap {
                        b = b.clamp(-f64::from(cap), f64::from(cap));
                        assert!((got - logits[e]).abs() <= cap + 2e-5 * logits[e].abs());
                    }
                    assert!(
                        close(*got, f64::from(logits[e]) - b, 2e-6),
                        "expert {e} of {experts}, case {case}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_binary_entropy_is_averaged_token_by_token() {
    let h2 = |p: f64| {
        let term = |p: f64| if p > 0.0 { -p * p.ln() } else { 0.0 };
        (term(p) + term(1.0 - p)) / 2f64.ln()
    };
    for experts in SIZES {
        for keep in [0.0, 0.9, 0.25] {
            let (mut got, mut want) = (vec![0.5f32; experts], vec![0.5f64; experts]);
            for logits in adversaries(experts) {
                with_rows!(experts, R => binary_entropy::<_, R>(Portable, &logits, keep, &mut got));
                let top = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
                let sum: f64 = logits.iter().map(|x| (f64::from(*x) - top).exp()).sum();
                for (e, (got, want)) in got.iter().zip(&mut want).enumerate() {
                    let p = (f64::from(logits[e]) - top).exp() / sum;
                    *want = f64::from(keep) * *want + (1.0 - f64::from(keep)) * h2(p);
                    assert!((0.0..=1.0).contains(got), "{got}");
                    assert!((f64::from(*got) - *want).abs() < 3e-6, "expert {e} of {experts}: {got}, {want}");
                }
            }
        }
    }
    // A share of one half gives exactly 1, certainty exactly 0.
    let of = |logits: &[f32]| {
        let mut h = vec![0.5; logits.len()];
        binary_entropy::<_, 1>(Portable, logits, 0.0, &mut h);
        h
    };
    assert_eq!(of(&[3.0, 3.0]), [1.0, 1.0]);
    assert_eq!(of(&[1000.0, 0.0, 0.0]), [0.0; 3]);
    assert_eq!(of(&[-2.0]), [0.0]);
}

#[test]
fn softmax_is_a_softmax() {
    for experts in SIZES {
        for logits in adversaries(experts) {
            let (e, top, sum) = with_rows!(experts, R => {
                let s = softmax(Portable, &load::<_, R>(Portable, &logits), &span::<R>(0, experts));
                (s.e.as_flattened().to_vec(), s.top, s.sum)
            });
            assert_eq!(top, logits.iter().copied().fold(f32::MIN, f32::max));
            let want: f64 = logits.iter().map(|x| (f64::from(*x) - f64::from(top)).exp()).sum();
            assert!(close(sum, want, 1e-6) && (1.0..=experts as f32).contains(&sum));
            assert!(e[experts..].iter().all(|x| *x == 0.0));
        }
    }
}

#[test]
fn weights_are_the_softmax_of_the_chosen_whatever_their_order() {
    for experts in SIZES {
        for logits in adversaries(experts) {
            let mut random = Random(experts as u64 + 99);
            for k in [1, 2, 5, experts] {
                if k > experts {
                    continue;
                }
                let mut chosen: Vec<u16> = vec![];
                while chosen.len() < k {
                    let e = random.below(experts) as u16;
                    if !chosen.contains(&e) {
                        chosen.push(e);
                    }
                }
                let weigh = |chosen: &[u16]| {
                    let mut out = vec![f32::NAN; k];
                    with_rows!(experts, R => weights(Portable, &load::<_, R>(Portable, &logits), chosen, &mut out));
                    out
                };
                let got = weigh(&chosen);
                let x = |e: &u16| f64::from(logits[usize::from(*e)]);
                let top = chosen.iter().map(x).fold(f64::MIN, f64::max);
                let sum: f64 = chosen.iter().map(|e| (x(e) - top).exp()).sum();
                for (e, got) in chosen.iter().zip(&got) {
                    assert!((f64::from(*got) - (x(e) - top).exp() / sum).abs() < 1e-6);
                }
                if k == 1 {
                    assert_eq!(got, [1.0]);
                }
                let mut back: Vec<f32> = weigh(&chosen.iter().rev().copied().collect::<Vec<_>>());
                back.reverse();
                assert!(got.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }
}

#[test]
fn groups_are_ranked_by_their_best_scores() {
    for (experts, counts) in [(1, vec![1]), (8, vec![1, 2, 4, 8]), (64, vec![4, 16, 32]), (1000, vec![8, 25])]
    {
        for x in adversaries(experts) {
            for &count in &counts {
                let size = experts / count;
                for best in [1, 2, size] {
                    if best > size {
                        continue;
                    }
                    let of_group: Vec<f32> = (0..count)
                        .map(|g| {
                            let mut s = x[g * size..(g + 1) * size].to_vec();
                            s.sort_by(|a, b| b.partial_cmp(a).unwrap());
                            s[1..best].iter().fold(s[0], |sum, x| sum + x)
                        })
                        .collect();
                    let order = sorted(&of_group, &(0..count).collect::<Vec<_>>());
                    for kept in [1, count.div_ceil(2), count] {
                        let by = Groups { count: count as u32, kept: kept as u32, best: best as u32 };
                        let got = with_rows!(experts, R => {
                            groups(Portable, &load::<_, R>(Portable, &x), experts, by).to_vec()
                        });
                        for e in 0..experts {
                            let want = order[..kept].contains(&((e / size) as u16));
                            assert_eq!(
                                got[e / 32] >> (e % 32) & 1 == 1,
                                want,
                                "expert {e} of {experts}, {by:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_bias_moves_the_ranking_and_no_weight() {
    let logits = [3.0, 2.0, 1.0, 0.0];
    let mut fixed = [[0.0; LANES]];
    fixed[0][0] = 1.5;
    let go = |bias: Option<Bias<'_>>| {
        let (mut chosen, mut weight) = ([0u16; 2], [0.0; 2]);
        let ranking = Ranking { bias, groups: None };
        route::<_, 1>(Portable, &logits, &ranking, &mut chosen, &mut weight);
        (chosen, weight)
    };
    let (plain, biased) = (go(None), go(Some(Bias { fixed: &fixed, cap: None })));
    assert_eq!((plain.0, biased.0), ([0, 1], [1, 0]));
    assert_eq!([plain.1[1], plain.1[0]].map(f32::to_bits), biased.1.map(f32::to_bits));
    // Clamped to 1/2, the bias changes no choice; clamped to 1, the tie is won by the lower index.
    for cap in [0.5, 1.0] {
        assert_eq!(go(Some(Bias { fixed: &fixed, cap: Some(cap) })), plain);
    }
}

#[test]
fn the_most_experts_fit() {
    let logits: Vec<f32> = (0..MAX_EXPERTS).map(|e| mix(e as u64) as u32 as f32).collect();
    let (mut chosen, mut weight) = (vec![0; MAX_EXPERTS], vec![0.0; MAX_EXPERTS]);
    route::<_, 32>(Portable, &logits, &Ranking::default(), &mut chosen, &mut weight);
    assert_eq!(chosen, sorted(&logits, &(0..MAX_EXPERTS).collect::<Vec<_>>()));
}
