//! R_A: adaptive routing by a contextual bandit. The paper (arXiv 2508.06526, R_A) names reinforcement learning and publishes no
//! code; this design is pikv's own.
//!
//! An *arm* is a set of coefficients (so one of R_T, R_LB, R_P, R_E, or a mix of them) and the number of experts whose pages are
//! fetched. All arms share the averages of load, misses and entropy, so a change of arm keeps them. An arm is in use from one feedback to
//! the next. Its reward is
//!
//! `hit - c1 MiB - c2 imbalance`
//!
//! with `hit` the share of wanted pages that were held and belong to a fetched expert, MiB read from elsewhere, and the imbalance
//! `sum_e share_e mu_e - 1` over the shares of this feedback's choices, which is above 0 if loaded experts were chosen. After a step
//! without wanted pages the arm stays in use and gets no reward. The context is `[1, mean m, v / (1 + v)]`, with `v` the mean of
//! `mu^2` minus 1.
//!
//! Arms are chosen by Thompson sampling on one ridge regression each (Agrawal and Goyal, arXiv 1209.3352). Its sums are discounted at
//! each feedback (Russac et al., arXiv 1909.09146), so that an arm with low rewards is tried again later. Arithmetic is f64 additions,
//! products, divisions and square roots in a fixed order, and random numbers are SplitMix64: a seed gives the same run on every
//! machine. A normal variate is the sum of 12 uniform ones minus 6.

use super::biased::Terms;
use super::on_device::DevicePlan;
use super::solve::solve;
use super::{
    ArmState, BanditState, Biased, Coefficients, Misses, PageFeedback, RouteError, Router, RouterKind,
    RouterState, Routes, Shape, coefficient, decay,
};
use pikv_core::hash;
use pikv_core::page::Position;

/// A choice of the bandit.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Arm {
    /// Weights of the bias, each at least 0; all 0 is R_T.
    pub coefficients: Coefficients,
    /// Experts of a row whose pages to fetch, 1..=top_k; see [`Routes::fetch`].
    pub fetch: u32,
}

impl Arm {
    /// Weights of the bias, and experts whose pages to fetch.
    pub const fn new(coefficients: Coefficients, fetch: u32) -> Arm {
        Arm { coefficients, fetch }
    }
}

/// R_A: options of the bandit.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Adaptive {
    /// The arms, at least 1. Default [`Adaptive::default_arms`].
    pub arms: Vec<Arm>,
    /// Seed of the random number generator.
    pub seed: u64,
    /// Reward subtracted for each MiB read from elsewhere (c1), at least 0. Default 0.01.
    pub remote_cost: f32,
    /// Reward subtracted for each unit of imbalance (c2), at least 0. Default 0.1.
    pub imbalance_cost: f32,
    /// Standard deviation of the sampled reward of an unplayed arm, above 0; larger values explore more. Default 0.25.
    pub width: f32,
    /// Factor of the regressions' sums at each feedback, at least 0 and below 1; default 0.999.
    pub memory: f32,
    /// Factor of the averages of load and misses at each feedback, and of entropy at each token. At least 0 and below 1; default 0.9.
    pub ema: f32,
    /// Bound of the bias, in logits: it is held within `±cap`. Default 1.
    pub cap: Option<f32>,
    /// Whether the model follows the ranking; needs a cap. Default false.
    pub model_choice: bool,
}

setters!(Adaptive {
    arms: Vec<Arm>,
    seed: u64,
    remote_cost: f32,
    imbalance_cost: f32,
    width: f32,
    memory: f32,
    ema: f32,
    model_choice: bool,
} optional { cap: f32 });

impl Adaptive {
    /// Default options, with [`Adaptive::default_arms`] of `top_k`.
    pub fn new(top_k: u32, seed: u64) -> Adaptive {
        Adaptive {
            arms: Self::default_arms(top_k),
            seed,
            remote_cost: 0.01,
            imbalance_cost: 0.1,
            width: 0.25,
            memory: 0.999,
            ema: 0.9,
            cap: Some(1.0),
            model_choice: false,
        }
    }

    /// R_T; R_LB with alpha 0.1; R_P with lambda 0.05 and 0.2; R_E with beta 0.1; and, if `top_k` is above 1, R_LB and R_E combined with
    /// R_P's lambda of 0.2, which fetch half of the experts. No two rank alike.
    pub fn default_arms(top_k: u32) -> Vec<Arm> {
        let all = [
            Coefficients::default(),
            Coefficients::new(0.1, 0.0, 0.0),
            Coefficients::new(0.0, 0.05, 0.0),
            Coefficients::new(0.0, 0.2, 0.0),
            Coefficients::new(0.0, 0.0, 0.1),
        ];
        let mut arms = all.map(|coefficients| Arm { coefficients, fetch: top_k }).to_vec();
        if top_k > 1 {
            let half = [Coefficients::new(0.1, 0.2, 0.0), Coefficients::new(0.0, 0.2, 0.1)];
            arms.extend(half.map(|coefficients| Arm { coefficients, fetch: top_k / 2 }));
        }
        arms
    }

    /// Builds the router.
    ///
    /// # Errors
    /// An invalid shape, no arms or two equal ones, options out of range, or `model_choice` without a cap.
    pub fn router(self, shape: Shape) -> Result<Bandit, RouteError> {
        let first = *self.arms.first().ok_or(RouteError::NoArms)?;
        let terms = Terms {
            coefficients: first.coefficients,
            acts: None,
            load: Some(self.ema),
            miss: Some((Misses::Rate, self.ema)),
            entropy: Some(self.ema),
            cap: self.cap,
            groups: None,
            model_choice: self.model_choice,
            more: 0,
        };
        let core = Biased::new(RouterKind::Adaptive, shape, terms)?;
        for (arm, &Arm { coefficients, fetch }) in self.arms.iter().enumerate() {
            let Coefficients { alpha, lambda, beta } = coefficients;
            for (name, value) in [("alpha", alpha), ("lambda", lambda), ("beta", beta)] {
                coefficient(name, value, false)?;
            }
            if fetch == 0 || fetch > shape.top_k {
                return Err(RouteError::Fetch { arm, fetch, top_k: shape.top_k });
            }
            if let Some(first) = self.arms[..arm].iter().position(|other| *other == self.arms[arm]) {
                return Err(RouteError::SameArms { first, second: arm });
            }
            if self.model_choice && self.cap.is_none() && coefficients != Coefficients::default() {
                return Err(RouteError::Uncapped);
            }
        }
        coefficient("remote_cost", self.remote_cost, false)?;
        coefficient("imbalance_cost", self.imbalance_cost, false)?;
        coefficient("width", self.width, true)?;
        decay("memory", self.memory)?;
        let learnt = BanditState { rng: self.seed, arm: 0, arms: vec![ArmState::default(); self.arms.len()] };
        let mut bandit = Bandit { options: self, core, learnt };
        bandit.choose();
        Ok(bandit)
    }
}

/// The router of [`Adaptive`].
#[derive(Clone, Debug)]
pub struct Bandit {
    options: Adaptive,
    core: Biased,
    learnt: BanditState,
}

/// An approximately normal variate of mean 0 and deviation 1.
fn normal(rng: &mut u64) -> f64 {
    let mut sum = -6.0;
    for _ in 0..12 {
        sum += (hash::next(rng) >> 11) as f64 / 9_007_199_254_740_992.0;
    }
    sum
}

fn dot(a: &[f64; 3], b: &[f64; 3]) -> f64 {
    a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
}

impl Bandit {
    /// The arm in use, an index into [`arms`](Adaptive#structfield.arms).
    pub fn arm(&self) -> usize {
        self.learnt.arm as usize
    }

    /// The averages, which all arms share.
    pub fn averages(&self) -> &Biased {
        &self.core
    }

    fn context(&self) -> [f64; 3] {
        let experts = f64::from(self.core.shape().experts);
        let miss: f64 = self.core.miss().iter().map(|m| f64::from(*m)).sum();
        let load: f64 = self.core.load().iter().map(|mu| f64::from(*mu) * f64::from(*mu)).sum();
        let uneven = (load / experts - 1.0).max(0.0);
        [1.0, miss / experts, uneven / (1.0 + uneven)]
    }

    /// Samples a reward for each arm and uses the arm with the largest; of equal ones the lower.
    fn choose(&mut self) {
        let x = self.context();
        let width = f64::from(self.options.width);
        let mut best = f64::NEG_INFINITY;
        for (arm, sums) in (0u32..).zip(&self.learnt.arms) {
            let y = solve(&sums.gram, x).unwrap_or([0.0; 3]);
            let deviation = dot(&x, &y).max(0.0).sqrt();
            let drawn = dot(&sums.reward, &y) + width * deviation * normal(&mut self.learnt.rng);
            if drawn > best {
                best = drawn;
                self.learnt.arm = arm;
            }
        }
        self.core.steer(self.options.arms[self.arm()].coefficients);
    }

    /// Adds `reward` to the arm in use.
    fn reward(&mut self, x: &[f64; 3], reward: f64) {
        let memory = f64::from(self.options.memory);
        for arm in &mut self.learnt.arms {
            arm.gram = arm.gram.map(|g| memory * g);
            arm.reward = arm.reward.map(|r| memory * r);
        }
        let arm = &mut self.learnt.arms[self.learnt.arm as usize];
        for (i, (sum, xi)) in arm.reward.iter_mut().zip(x).enumerate() {
            *sum += reward * xi;
            for (j, xj) in x[..=i].iter().enumerate() {
                arm.gram[i * (i + 1) / 2 + j] += xi * xj;
            }
        }
    }
}

impl Router for Bandit {
    fn kind(&self) -> RouterKind {
        RouterKind::Adaptive
    }

    fn shape(&self) -> Shape {
        self.core.shape()
    }

    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError> {
        let fetch = self.options.arms[self.arm()].fetch;
        self.core.route_fetching(first, logits, fetch, out)
    }

    fn device_plan(&self) -> Result<DevicePlan<'_>, RouteError> {
        self.core.plan_fetching(self.options.arms[self.arm()].fetch)
    }

    fn routed(&mut self, chosen: &[u16], entropy: &[f32]) -> Result<(), RouteError> {
        self.core.routed(chosen, entropy)
    }

    fn observe(&mut self, feedback: &PageFeedback<'_>) -> Result<(), RouteError> {
        feedback.check(&self.shape())?;
        let context = self.context();
        let counts = self.core.counts().to_vec();
        self.core.learn(feedback);
        let total: u64 = counts.iter().sum();
        if total > 0 {
            let sum = |pages: &[u32]| pages.iter().map(|n| u64::from(*n)).sum::<u64>() as f64;
            let (wanted, missed) = (sum(feedback.wanted), sum(feedback.missed));
            if wanted == 0.0 {
                // Without wanted pages there is no reward: the arm stays in use.
                return Ok(());
            }
            let hit = 1.0 - missed / wanted;
            let met: f64 =
                counts.iter().zip(self.core.load()).map(|(n, mu)| *n as f64 * f64::from(*mu)).sum();
            let reward = hit
                - f64::from(self.options.remote_cost) * feedback.remote_bytes as f64 / 1_048_576.0
                - f64::from(self.options.imbalance_cost) * (met / total as f64 - 1.0);
            self.reward(&context, reward);
        }
        self.choose();
        Ok(())
    }

    fn discard(&mut self) {
        self.core.discard();
    }

    fn state(&self) -> RouterState {
        RouterState { bandit: Some(self.learnt.clone()), ..self.core.state() }
    }

    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError> {
        state.check_as(&self.state())?;
        if let Some(learnt) = &state.bandit {
            self.learnt.clone_from(learnt);
        }
        self.core.adopt(state);
        self.core.steer(self.options.arms[self.arm()].coefficients);
        Ok(())
    }
}
