//! Attention over a [`Model`], in f64.
//!
//! *Error bounds of attention:*
//!
//! * Integer keys: the query times the scales is rounded to 16 bits. For each channel a logit moves by at most half a step of
//!   `max_c |q_c scale_c| / 32639`, times the largest code.
//! * Integer values: the weight times the scale of each token is rounded likewise. For each token of each page an output moves by at most
//!   half a step of `max_t p_t max_t scale_t / 32639`, times the largest code.
//! * The rest is f32: chains of fused multiply-adds. Each rounds by 2^-24 of a partial sum that is below `sum_c |q_c| |k_c|` (for packed
//!   keys with |minimum| + scale * top in place of |k_c|). 8 of these roundings are allowed, since they do not add up in one direction, and
//!   twice as many for keys rotated on read.
//!
//! If no logit is off by more than d, the log-sum-exp is off by at most d, and an output by `(e^2d - 1)` of the largest value.

use crate::model::{Decoded, Model};
use crate::oracle::{integer, top};
use crate::setup::{Setup, key, query, value};
use pikv::shape::Pairs;
use pikv::{Attend, Rope};

const ULP: f64 = 1.0 / 16_777_216.0;

/// The expected output of a row of one query head, and its error bounds.
pub struct Row {
    pub out: Vec<f64>,
    pub lse: f64,
    pub out_off: f64,
    pub lse_off: f64,
    /// Weights by KV head and position.
    pub weights: Vec<(usize, u32, f64)>,
}

impl Model {
    /// The expected rows of the token at position `p`, with the newest tokens up to itself in the ring; all query heads.
    pub fn row(&self, setup: &Setup, p: u32, options: &Attend) -> Vec<Row> {
        let layer = &setup.layer;
        let (k_dim, v_dim) = (layer.layout.k_dim as usize, layer.layout.v_dim as usize);
        let q = query(setup, self.layer, self.ids[p as usize]);
        let lo = layer.window.map_or(0, |w| (p + 1).saturating_sub(w));
        // Tokens that leave the ring in the step that adds them are read there.
        let ring = (p + 1).saturating_sub(setup.ring).min(self.known);
        let group = layer.group() as usize;
        let scale = f64::from(options.scale);
        let mut rows = vec![];
        for h in 0..layer.query_heads as usize {
            let head = h / group;
            let q = &q[h * k_dim..][..k_dim];
            let turned = turn(layer.rope, &q.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), p);
            let (mut off, mut v_most) = (0f64, 0f64);
            // Positions, logits and values of all that is seen.
            let mut seen: Vec<(u32, f64, Vec<f64>)> = vec![];
            // For each packed page, its visible tokens, and the cost of rounding at weight 1.
            let mut rounded = vec![];
            let logit = |k: &[f64], at: u32| scale * dot(&turn(layer.rope, k, at), &turned);
            let plain = |at: u32| {
                let id = self.ids[at as usize];
                let wide = |row: Vec<f32>| row.into_iter().map(f64::from).collect::<Vec<_>>();
                (wide(key(setup, self.layer, id, head)), wide(value(setup, self.layer, id, head)))
            };
            for at in (ring..=p).filter(|at| *at >= lo || *at < setup.sinks) {
                let (k, v) = plain(at);
                off = off.max(8.0 * ULP * scale * sum_abs(&k, &turned));
                seen.push((at, logit(&k, at), v));
            }
            for (c, page) in
                self.runs[head].iter().enumerate().flat_map(|(c, run)| run.iter().map(move |p| (c, p)))
            {
                let in_sight = |at: &u32| *at < ring && (*at >= lo || c == 0);
                if page.gone || !page.positions.iter().any(in_sight) {
                    continue;
                }
                let decoded = page.by.filter(|by| *by < ring).map(|_| self.decoded(setup, head, page, ring));
                if let Some(decoded) = decoded {
                    off = off.max(scale * decoded.logit_off(setup, &turned));
                    v_most = v_most.max(decoded.v_most);
                }
                let first = seen.len();
                for (t, at) in page.positions.iter().enumerate().filter(|(_, at)| in_sight(at)) {
                    let (k, v) = match decoded {
                        Some(decoded) => (decoded.keys[t].clone(), decoded.values[t].clone()),
                        None => plain(*at),
                    };
                    off = off.max(8.0 * ULP * scale * sum_abs(&k, &turned));
                    seen.push((*at, logit(&k, *at), v));
                }
                rounded.extend(decoded.map(|decoded| (first..seen.len(), decoded.v_step)));
            }
            if let Some(cap) = options.softcap.map(f64::from) {
                seen.iter_mut().for_each(|(_, x, _)| *x = cap * (*x / cap).tanh());
                off += 2.5e-7 * cap;
            }
            let top = seen.iter().fold(f64::MIN, |m, x| m.max(x.1));
            let sum: f64 = seen.iter().map(|x| (x.1 - top).exp()).sum();
            let lse = top + sum.ln();
            let mut out = vec![0.0; v_dim];
            let mut weights = vec![];
            for (at, x, v) in &seen {
                let weight = (x - lse).exp();
                weights.push((head, *at, weight));
                out.iter_mut().zip(v).for_each(|(out, v)| *out += weight * v);
                v_most = v.iter().fold(v_most, |m, v| m.max(v.abs()));
            }
            let lse_off = off + 4.0 * ULP * (lse.abs() + 1.0);
            let rounding: f64 = rounded
                .into_iter()
                .map(|(tokens, step)| {
                    step * tokens.len() as f64 * weights[tokens].iter().fold(0.0, |m, x| x.2.max(m))
                })
                .sum();
            let float = ((2.0 * off).exp_m1() + 16.0 * ULP) * v_most;
            let out_off = float + (2.0 * off).exp() * rounding;
            rows.push(Row { out, lse, out_off, lse_off, weights });
        }
        rows
    }

    /// Checks every `some`-th of the newest `n` rows, and the last.
    #[track_caller]
    pub fn check(&self, setup: &Setup, n: u32, options: &Attend, out: &[f32], lse: &[f32], some: usize) {
        let (heads, v_dim) = (setup.layer.query_heads as usize, setup.layer.layout.v_dim as usize);
        for i in (0..n as usize).filter(|i| i.is_multiple_of(some) || *i + 1 == n as usize) {
            let p = self.len() - n + i as u32;
            for (h, row) in self.row(setup, p, options).iter().enumerate() {
                let at = i * heads + h;
                let off = (f64::from(lse[at]) - row.lse).abs();
                assert!(
                    off <= row.lse_off,
                    "row {p} head {h}: lse {}, want {}, off {off} > {} in {setup:?}",
                    lse[at],
                    row.lse,
                    row.lse_off
                );
                for (c, (got, want)) in out[at * v_dim..].iter().zip(&row.out).enumerate() {
                    let off = (f64::from(*got) - want).abs();
                    assert!(
                        off <= row.out_off,
                        "row {p} head {h} channel {c}: {got}, want {want}, off {off} > {} in {setup:?}",
                        row.out_off
                    );
                }
            }
        }
    }
}

impl Decoded {
    /// The error bound of a logit, before the factor.
    fn logit_off(&self, setup: &Setup, q: &[f64]) -> f64 {
        let map = self.k_map.as_ref();
        let n = self.stored.k_dim;
        // The folded query, and its folded magnitudes.
        let (mut folded, mut most, mut bias) =
            (q.to_vec(), q.iter().map(|x| x.abs()).collect::<Vec<_>>(), 0.0);
        if let Some(map) = map {
            let decode = map.decode();
            let fold = |abs: bool| -> Vec<f64> {
                let abs = |x: f64| if abs { x.abs() } else { x };
                (0..n)
                    .map(|c| q.iter().enumerate().map(|(w, q)| abs(f64::from(decode[w * n + c]) * q)).sum())
                    .collect()
            };
            (folded, most) = (fold(false), fold(true));
            bias = map.bias().map_or(0.0, |b| b.iter().zip(q).map(|(b, q)| (f64::from(*b) * q).abs()).sum());
        }
        let float = 8.0 * ULP * (dot(&most, &self.k_most) + bias);
        if setup.layer.rope.is_some() || !integer(self.stored.k) {
            return 2.0 * float;
        }
        let largest = folded.iter().zip(&self.k_scales).fold(0f64, |m, (q, s)| m.max((q * s).abs()));
        float + largest / 65278.0 * f64::from(top(self.stored.k)) * n as f64
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn sum_abs(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

pub fn turn(rope: Option<Rope>, row: &[f64], position: u32) -> Vec<f64> {
    let mut row = row.to_vec();
    let Some(rope) = rope else { return row };
    for i in 0..rope.rotary_dim as usize / 2 {
        let angle = f64::from(position) * rope.theta.powf(-2.0 * i as f64 / f64::from(rope.rotary_dim));
        let (a, b) = match rope.pairs {
            Pairs::Halves => (i, i + rope.rotary_dim as usize / 2),
            _ => (2 * i, 2 * i + 1),
        };
        let (x, y) = (row[a], row[b]);
        (row[a], row[b]) = (x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin());
    }
    row
}
