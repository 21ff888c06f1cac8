//! A model of a sequence with packed pages: keeps a copy of every token, and packs by the rule. A token that leaves the ring is appended to
//! its expert's run. A page is packed by the token that fills it, or by the one with which it would span more than 65,536 positions. A row
//! reads the packed form if the token that packed the page has left the row's ring, else the unpacked one. With a second codec, the page is
//! packed again by the token that many positions later, and rows whose ring that token has left read the second form.

use crate::oracle::{Shape, integer, scaled, top};
use crate::setup::{Setup, key, value};
use pikv::codec::{BlockBasis, Coding, Map, block_basis, pyramid};
use pikv::report::Place;
use pikv::shape::PAGE;
use pikv_test::runs;
use std::cell::OnceCell;
use std::collections::HashMap;

/// The tokens of a packed page, decoded.
#[derive(Clone, Debug)]
pub struct Decoded {
    pub stored: Shape,
    /// Decodes stored channels of a key to the head's: the map of the codec, or one stored in the page.
    pub k_map: Option<Map>,
    pub keys: Vec<Vec<f64>>,
    pub values: Vec<Vec<f64>>,
    /// Key and value of each token as they are read, to the bit.
    pub read: Vec<(Vec<f32>, Vec<f32>)>,
    /// For each stored channel of a key: the scale, and the largest magnitude in a product.
    pub k_scales: Vec<f64>,
    pub k_most: Vec<f64>,
    pub v_most: f64,
    /// The largest effect of half a step of a weight, for a largest weight of 1.
    pub v_step: f64,
}

#[derive(Clone, Debug, Default)]
pub struct Page {
    pub positions: Vec<u32>,
    /// The position that packed it.
    pub by: Option<u32>,
    /// Evicted.
    pub gone: bool,
    /// Out of every window that can still be asked for, so freed.
    pub passed: bool,
    /// Decoded from the first codec's form, and from the second's.
    pub decoded: [OnceCell<Decoded>; 2],
}

#[derive(Clone, Debug)]
pub struct Model {
    pub layer: usize,
    pub ids: Vec<u64>,
    pub filed: u32,
    /// Tokens before the newest step: those of a step have no experts yet.
    pub known: u32,
    /// First position that no rollback takes away.
    pub kept: u32,
    /// `[head]`, the sinks and each expert.
    pub runs: Vec<Vec<Vec<Page>>>,
}

impl Page {
    pub fn held(&self) -> bool {
        !self.gone && !self.passed
    }
}

impl Model {
    pub fn new(setup: &Setup, layer: usize) -> Model {
        let runs = vec![vec![vec![]; setup.experts as usize + 1]; setup.layer.kv_heads as usize];
        Model { layer, ids: vec![], filed: 0, known: 0, kept: 0, runs }
    }

    pub fn len(&self) -> u32 {
        self.ids.len() as u32
    }

    pub fn limit(&self, setup: &Setup) -> u32 {
        if self.kept == 0 { self.len() } else { self.len().saturating_sub(self.kept + setup.ring) }
    }

    /// The tokens of a step.
    pub fn push(&mut self, setup: &Setup, ids: &[u64]) {
        self.known = self.len();
        self.ids.extend(ids);
        let left = self.len().saturating_sub(setup.ring);
        let files = setup.layer.window.is_none_or(|w| w > setup.ring);
        while self.filed < left {
            let p = self.filed;
            self.filed += 1;
            let c = if p < setup.sinks {
                0
            } else {
                let home = setup.home(self.layer, self.ids[p as usize]);
                1 + usize::from(runs::run(setup.experts, setup.layer.window, p, home))
            };
            if c > 0 && !files {
                continue;
            }
            for (h, head) in self.runs.iter_mut().enumerate() {
                let packs = c > 0 && setup.codec(h).is_some();
                let run = &mut head[c];
                let open = |page: &&mut Page| !page.gone && page.by.is_none() && page.positions.len() < 32;
                match run.last_mut().filter(open) {
                    Some(page) if packs && p - page.positions[0] > 65_535 => {
                        page.by = Some(p);
                        run.push(Page { positions: vec![p], ..Page::default() });
                    }
                    Some(page) => page.positions.push(p),
                    None => run.push(Page { positions: vec![p], ..Page::default() }),
                }
                let page = run.last_mut().unwrap();
                if packs && page.positions.len() == 32 {
                    page.by = Some(p);
                }
            }
        }
        self.kept = self.kept.max(self.len().saturating_sub(setup.ring + setup.rollback));
        let Some(window) = setup.layer.window else { return };
        let (seen, kept) = (self.len().saturating_sub(window + setup.rollback), self.kept);
        for run in self.runs.iter_mut().flat_map(|head| &mut head[1..]) {
            for page in run.iter_mut().filter(|page| page.held()) {
                // A page that was packed early may be unpacked again, although no row sees it.
                let done = page.positions.len() == 32 || page.by.is_some_and(|by| by < kept);
                if !done || page.positions[page.positions.len() - 1] >= seen {
                    break;
                }
                page.passed = true;
            }
        }
    }

    pub fn rollback(&mut self, setup: &Setup, n: u32) {
        self.ids.truncate((self.len() - n) as usize);
        let left = self.len().saturating_sub(setup.ring);
        self.filed = self.filed.min(left);
        for run in self.runs.iter_mut().flatten() {
            for page in run.iter_mut() {
                page.positions.retain(|p| *p < left);
                if page.by.is_some_and(|by| by >= left) {
                    (page.by, page.decoded) = (None, Default::default());
                }
            }
            while run.last().is_some_and(|page| page.positions.is_empty()) {
                run.pop();
            }
        }
    }

    /// Bytes that this layer holds.
    pub fn bytes(&self, setup: &Setup) -> u64 {
        let full = setup.layer.layout.bytes();
        let tiles = u64::from(self.len().div_ceil(PAGE) - if self.len() == 0 { 0 } else { self.kept / PAGE });
        let page = |h: usize, page: &Page| match page.by {
            _ if !page.held() => 0,
            None => full,
            Some(by) => match setup.ages_at(by) {
                Some(at) if at < self.kept => setup.aged_bytes(),
                at => {
                    let aged = at.is_some_and(|at| at < self.filed);
                    setup.packed_bytes(h)
                        + if by >= self.kept { full } else { 0 }
                        + if aged { setup.aged_bytes() } else { 0 }
                }
            },
        };
        let head = |(h, head): (usize, &Vec<Vec<Page>>)| {
            tiles * full + head.iter().flatten().map(|p| page(h, p)).sum::<u64>()
        };
        self.runs.iter().enumerate().map(head).sum()
    }

    /// The form of a packed page that a row with a ring from position `ring` reads.
    pub fn decoded<'a>(&'a self, setup: &Setup, head: usize, page: &'a Page, ring: u32) -> &'a Decoded {
        let old = page.by.and_then(|by| setup.ages_at(by)).is_some_and(|at| at < ring);
        page.decoded[usize::from(old)].get_or_init(|| {
            let first = setup.codec(head).unwrap();
            let codec = setup.age.as_ref().filter(|_| old).map_or(first, |(_, second)| second);
            let (k_dim, v_dim) = (setup.layer.layout.k_dim, setup.layer.layout.v_dim);
            let stored = Shape {
                k_dim: codec.k.stored(k_dim) as usize,
                v_dim: codec.v.stored(v_dim) as usize,
                k: codec.k.code(),
                v: codec.v.code(),
            };
            let rows = |row: fn(&Setup, usize, u64, usize) -> Vec<f32>| -> Vec<Vec<f32>> {
                let ids = page.positions.iter().map(|p| self.ids[*p as usize]);
                ids.map(|id| row(setup, self.layer, id, head)).collect()
            };
            let (k, v) = if old {
                self.decoded(setup, head, page, 0).read.iter().cloned().unzip()
            } else {
                (rows(key), rows(value))
            };
            let (k_map, k) = factored(&codec.k, k);
            let (v_map, v) = factored(&codec.v, v);
            let (k, v) = (encode(k_map.as_ref(), k), encode(v_map.as_ref(), v));
            let words = stored.pack(&page.positions, &k, &v);
            let all = |n, read: &dyn Fn(usize, usize) -> f64, map, dim| -> Vec<Vec<f64>> {
                let row = |t| decode(map, &(0..n).map(|c| read(t, c)).collect::<Vec<_>>(), dim);
                (0..page.positions.len()).map(row).collect()
            };
            let keys = all(stored.k_dim, &|t, c| stored.key(&words, t, c), k_map.as_ref(), k_dim as usize);
            let values =
                all(stored.v_dim, &|t, c| stored.value(&words, t, c), v_map.as_ref(), v_dim as usize);
            // Scale times code plus minimum is exact in f64, so this rounds once, as a fused multiply-add does.
            let exact = |map: Option<&Map>, n, read: &dyn Fn(usize) -> f64| -> Vec<f32> {
                let stored: Vec<f32> = (0..n).map(|c| read(c) as f32).collect();
                let Some(map) = map else { return stored };
                let mut whole = vec![0.0; map.wide() as usize];
                map.decode_row(&stored, &mut whole);
                whole
            };
            let token = |t: usize| {
                let k = exact(k_map.as_ref(), stored.k_dim, &|c| stored.key(&words, t, c));
                (k, exact(v_map.as_ref(), stored.v_dim, &|c| stored.value(&words, t, c)))
            };
            let read = (0..page.positions.len()).map(token).collect();
            let most = |code, (scale, min): (f64, f64), x: f64| {
                if scaled(code) { f64::abs(min) + scale * f64::from(top(code)) } else { x.abs() }
            };
            let fill = page.positions.len();
            let k_most = |c: usize| {
                let x = k.iter().fold(0f64, |m, row: &Vec<f32>| m.max(f64::from(row[c].abs())));
                most(stored.k, stored.k_scale(&words, 0, c), x)
            };
            let v_most = (0..fill * stored.v_dim).map(|i| {
                let (t, c) = (i / stored.v_dim, i % stored.v_dim);
                most(stored.v, stored.v_scale(&words, t, c), f64::from(v[t][c]))
            });
            // A map back sums the weights of its rows.
            let gain = v_map.as_ref().map_or(1.0, |map| {
                let narrow = map.narrow() as usize;
                let rows = map
                    .decode()
                    .chunks(narrow)
                    .map(|row| row.iter().map(|x| f64::from(x.abs())).sum())
                    .fold(1.0, f64::max);
                rows + map.bias().map_or(0.0, |b| b.iter().fold(0.0, |m: f64, x| m.max(f64::from(x.abs()))))
            });
            let v_scale = (0..fill * stored.v_dim)
                .map(|i| stored.v_scale(&words, i / stored.v_dim, i % stored.v_dim).0)
                .fold(0.0, f64::max);
            let step = if integer(stored.v) { f64::from(top(stored.v)) / 65278.0 } else { 0.0 };
            Decoded {
                v_step: step * v_scale * gain,
                k_scales: (0..stored.k_dim).map(|c| stored.k_scale(&words, 0, c).0).collect(),
                k_most: (0..stored.k_dim).map(k_most).collect(),
                v_most: v_most.fold(0.0, f64::max) * gain,
                keys,
                values,
                read,
                k_map,
                stored,
            }
        })
    }

    /// Positions of the tokens of the pages outside the ring, by head and page.
    pub fn placed(&self) -> HashMap<(usize, Place, u32), &Page> {
        let mut all = HashMap::new();
        for (h, head) in self.runs.iter().enumerate() {
            for (c, run) in head.iter().enumerate() {
                let place = if c == 0 { Place::Sinks } else { Place::Run(c as u16 - 1) };
                all.extend(run.iter().enumerate().map(|(i, page)| ((h, place, i as u32), page)));
            }
        }
        all
    }
}

/// The rows of a page to code, and the map: the codec's, or that of the page's own basis. Means replace their tokens.
fn factored(coding: &Coding, rows: Vec<Vec<f32>>) -> (Option<Map>, Vec<Vec<f32>>) {
    let dim = rows[0].len();
    if let Some(level) = coding.level() {
        let means = pyramid(&rows.concat(), dim, level).unwrap().reconstruct(level - 1).unwrap();
        return (None, means.chunks(dim).map(<[f32]>::to_vec).collect());
    }
    let Some(rank) = coding.rank() else { return (coding.mapped().cloned(), rows) };
    let (wide, n) = (dim as u32, rank as usize);
    let BlockBasis { mean, mut basis, .. } = block_basis(&rows.concat(), wide, rank.min(wide)).unwrap();
    basis.resize(n * dim, 0.0);
    let down = basis.clone();
    let up = (0..dim * n).map(|i| basis[i % n * dim + i / n]).collect();
    (Some(Map::new(wide, rank, down, up, Some(mean)).unwrap()), rows)
}

fn encode(map: Option<&Map>, rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let Some(map) = map else { return rows };
    let mut out = vec![0.0; map.narrow() as usize];
    let mut row = |row: &Vec<f32>| {
        map.encode_row(row, &mut out);
        out.clone()
    };
    rows.iter().map(&mut row).collect()
}

fn decode(map: Option<&Map>, stored: &[f64], dim: usize) -> Vec<f64> {
    let Some(map) = map else { return stored.to_vec() };
    let (matrix, bias) = (map.decode(), map.bias().unwrap_or_default());
    let row = |w: usize| {
        let terms = matrix[w * stored.len()..].iter().zip(stored).map(|(m, x)| f64::from(*m) * x);
        terms.sum::<f64>() + bias.get(w).map_or(0.0, |b| f64::from(*b))
    };
    (0..dim).map(row).collect()
}
