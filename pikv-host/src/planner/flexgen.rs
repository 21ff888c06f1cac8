//! FlexGen: places pages in tiers by a linear program (arXiv 2303.06865, its cost model and policy search). Needs the feature
//! `plan`.
//!
//! A decode step takes as long as its slowest stream: compute, and for each link its reads and its writes, all in parallel. So
//! `T = max(compute, up_1, down_1, up_2, ..)`. Each term, and the bytes in each tier, are linear in the shares. FlexGen searches the
//! shares of weights, activations and cache, and the place of attention; here only pages are placed, and attention runs in the first
//! tier. The size of the first tier and the rates of links must be measured: the plan is as accurate as they are.

use crate::base::text::{Seconds, Table};
use crate::tiers::TierRate;
use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};
use std::fmt;
use thiserror::Error;

/// A tier below the first, and its link to faster tiers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Tier {
    /// Name for messages, such as host or file.
    pub name: String,
    /// Bytes of pages that it can hold.
    pub capacity: u64,
    /// Bytes a second that the link reads.
    pub read: f64,
    /// Bytes a second that the link writes, at the same time.
    pub write: f64,
    /// Whether the link ends in the first tier. If not, its pages also use the links of the previous tier, as those of a file go through
    /// host memory.
    pub direct: bool,
}

impl From<TierRate> for Tier {
    /// A tier with a link of its own to the first tier.
    fn from(rate: TierRate) -> Self {
        let TierRate { name, capacity, read, write } = rate;
        Tier { name, capacity, read, write, direct: true }
    }
}

impl Tier {
    /// A tier of `capacity` bytes, with a link to the first tier of `read` and `write` bytes a second.
    pub fn new(name: impl Into<String>, capacity: u64, read: f64, write: f64) -> Tier {
        Tier { name: name.into(), capacity, read, write, direct: true }
    }
}

setters!(Tier { direct: bool });

/// Pages of one kind: of the same layer, codec and kind of head.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Class {
    /// Name for messages.
    pub name: String,
    /// Number of pages.
    pub pages: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Share of the pages that a step reads; 1 for exact attention.
    pub read: f64,
    /// Share of the pages that a step writes.
    pub write: f64,
}

impl Class {
    /// `pages` pages of `page_bytes` bytes; a step reads all of them and writes none.
    pub fn new(name: impl Into<String>, pages: u64, page_bytes: u64) -> Class {
        Class { name: name.into(), pages, page_bytes, read: 1.0, write: 0.0 }
    }
}

setters!(Class { read: f64, write: f64 });

/// Tiers to place pages in, and the time of a step without them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Machine {
    /// Bytes of pages that the first tier can hold: device memory, or host memory without a device.
    pub fast: u64,
    /// The lower tiers, fastest first.
    pub tiers: Vec<Tier>,
    /// Seconds of a step with all pages in the first tier; the links' streams run in parallel.
    pub compute: f64,
}

impl Machine {
    /// A machine with `fast` bytes of pages in the first tier and lower `tiers`, fastest first. `compute` is 0.
    pub fn new(fast: u64, tiers: Vec<Tier>) -> Machine {
        Machine { fast, tiers, compute: 0.0 }
    }
}

setters!(Machine { fast: u64, tiers: Vec<Tier>, compute: f64 });

/// A placement of pages in tiers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TierPlacement {
    /// Pages of each class in each tier, `[class][tier]`, the first tier first.
    pub pages: Vec<Vec<u64>>,
    /// Seconds of a step.
    pub seconds: f64,
    /// A lower bound on the seconds of any placement, even of parts of pages (to the solver's tolerance, 1e-7 of the slowest stream).
    pub bound: f64,
    /// Seconds of each link: reads and writes.
    pub links: Vec<(f64, f64)>,
}

impl fmt::Display for TierPlacement {
    /// A table of the pages of each class in each tier; then the seconds of a step, and of each link.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::default();
        let tiers = self.pages.first().map_or(0, Vec::len);
        let name = |tier: usize| match tier {
            0 => "first tier".to_owned(),
            tier => format!("tier {tier}"),
        };
        table.cells(std::iter::once("pages of class".to_owned()).chain((0..tiers).map(name)));
        for (class, pages) in self.pages.iter().enumerate() {
            table
                .cells(std::iter::once(class).map(|n| n.to_string()).chain(pages.iter().map(u64::to_string)));
        }
        writeln!(f, "{table}")?;
        write!(f, "a step takes {}, at least {}", Seconds(self.seconds), Seconds(self.bound))?;
        for (link, (up, down)) in self.links.iter().enumerate() {
            write!(f, "; link {} {} up and {} down", link + 1, Seconds(*up), Seconds(*down))?;
        }
        Ok(())
    }
}

/// An error of placing pages.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// The tiers together are too small.
    #[error("{needed} bytes of pages, {capacity} in all tiers: whole pages fit if {tier} has {would} bytes")]
    Capacity {
        /// Bytes of all pages.
        needed: u64,
        /// Bytes of all tiers.
        capacity: u64,
        /// Name of the last tier.
        tier: String,
        /// Bytes of the last tier with which all pages fit, with the other tiers unchanged.
        would: u64,
    },
    /// A number out of range.
    #[error("{what} of {name}: {value}; it must be {range}")]
    Value {
        /// Name of the number.
        what: &'static str,
        /// Name of the tier, class or machine.
        name: String,
        /// The value.
        value: f64,
        /// Accepted values.
        range: &'static str,
    },
    /// The solver failed.
    #[error("the linear program was not solved: {0}")]
    Solver(String),
}

impl TierPlacement {
    /// The share of a class's pages in each tier, for [`Sequence::arrange`](crate::Sequence::arrange); all in the first tier for an unknown
    /// or empty class.
    pub fn shares(&self, class: usize) -> Vec<f64> {
        let tiers = self.links.len() + 1;
        let pages = self.pages.get(class).filter(|pages| pages.iter().any(|n| *n > 0));
        let Some(pages) = pages else {
            return (0..tiers).map(|tier| f64::from(u8::from(tier == 0))).collect();
        };
        let all: u64 = pages.iter().sum();
        pages.iter().map(|n| *n as f64 / all as f64).collect()
    }
}

impl Machine {
    fn capacity(&self, tier: usize) -> u64 {
        tier.checked_sub(1).map_or(self.fast, |below| self.tiers[below].capacity)
    }

    /// Links that pages of a tier use, as indices into `tiers`.
    fn path(&self, tier: usize) -> impl Iterator<Item = usize> {
        (0..tier).rev().scan(true, |more, link| {
            let take = *more;
            *more = take && !self.tiers[link].direct;
            take.then_some(link)
        })
    }

    /// Seconds of each link, reads and writes, for `pages[class][tier]`.
    fn links(&self, classes: &[Class], pages: &[Vec<u64>]) -> Vec<(f64, f64)> {
        let mut seconds = vec![(0.0, 0.0); self.tiers.len()];
        for (class, pages) in classes.iter().zip(pages) {
            for (tier, n) in pages.iter().enumerate() {
                for link in self.path(tier) {
                    let (up, down) = self.stream(class, link);
                    seconds[link].0 += *n as f64 * up;
                    seconds[link].1 += *n as f64 * down;
                }
            }
        }
        seconds
    }

    /// Seconds that one page of a class uses a link in a step, to read and to write.
    fn stream(&self, class: &Class, link: usize) -> (f64, f64) {
        let Tier { read, write, .. } = self.tiers[link];
        let bytes = class.page_bytes as f64;
        (bytes * class.read / read, bytes * class.write / write)
    }

    fn slowest(&self, links: &[(f64, f64)]) -> f64 {
        links.iter().fold(self.compute, |slowest, (up, down)| slowest.max(*up).max(*down))
    }

    fn check(&self, classes: &[Class]) -> Result<(), PlacementError> {
        let value = |what, name: &str, value: f64, fine: bool, range| {
            if fine {
                Ok(())
            } else {
                Err(PlacementError::Value { what, name: name.to_owned(), value, range })
            }
        };
        let share =
            |what, name, x: f64| value(what, name, x, x.is_finite() && x >= 0.0, "finite and at least 0");
        share("seconds", "compute", self.compute)?;
        for Tier { name, read, write, .. } in &self.tiers {
            for (what, rate) in [("read rate", *read), ("write rate", *write)] {
                value(what, name, rate, rate.is_finite() && rate > 0.0, "finite and above 0")?;
            }
        }
        for Class { name, page_bytes, read, write, .. } in classes {
            value("bytes of a page", name, *page_bytes as f64, *page_bytes > 0, "at least 1")?;
            share("share read", name, *read)?;
            share("share written", name, *write)?;
        }
        Ok(())
    }

    /// Places the pages of `classes` so that a decode step is shortest; of equal placements the one with the most bytes in fast tiers.
    ///
    /// The linear program is solved over shares, which are then rounded to whole pages within the capacities. The step is longer than
    /// [`TierPlacement::bound`] by at most the time of one page a class and tier.
    ///
    /// # Errors
    /// [`PlacementError::Capacity`] with the capacity that suffices, [`PlacementError::Value`] for a rate, share or time out of range,
    /// [`PlacementError::Solver`].
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::planner::flexgen::{Class, Machine, Tier};
    /// let tier = |name: &str, capacity, rate, direct| {
    ///     Tier::new(name, capacity, rate, rate).direct(direct)
    /// };
    /// // 1 MB fits on the device. A disk on a link of its own has a third of the host's rate: it gets a quarter of the rest.
    /// let tiers = vec![tier("host", 1 << 40, 3e9, true), tier("file", 1 << 40, 1e9, true)];
    /// let machine = Machine::new(1_000_000, tiers);
    /// let pages = Class::new("pool", 5000, 1000);
    /// let placement = machine.place(&[pages])?;
    /// assert_eq!(placement.pages, [[1000, 3000, 1000]]);
    /// assert!((placement.seconds - 0.001).abs() < 1e-9);
    /// # Ok::<(), pikv::planner::flexgen::PlacementError>(())
    /// ```
    pub fn place(&self, classes: &[Class]) -> Result<TierPlacement, PlacementError> {
        self.check(classes)?;
        let tiers = self.tiers.len() + 1;
        let needed: u64 =
            classes.iter().fold(0, |sum, c| sum.saturating_add(c.pages.saturating_mul(c.page_bytes)));
        let capacity = (0..tiers).fold(0u64, |sum, tier| sum.saturating_add(self.capacity(tier)));
        if needed > capacity {
            return Err(self.too_small(classes, needed, capacity));
        }
        let (shares, bound) = self.shares(classes, needed)?;
        let pages = self.round(classes, &shares).ok_or_else(|| self.too_small(classes, needed, capacity))?;
        let links = self.links(classes, &pages);
        Ok(TierPlacement { seconds: self.slowest(&links), pages, bound, links })
    }

    /// For each class its share in each tier, and the seconds of a step.
    fn shares(&self, classes: &[Class], needed: u64) -> Result<(Vec<Vec<f64>>, f64), PlacementError> {
        let tiers = self.tiers.len() + 1;
        // Times in units of the longest possible stream, bytes in units of all bytes: coefficients of about 1.
        let everywhere: Vec<Vec<u64>> =
            classes.iter().map(|c| (0..tiers).map(|_| c.pages).collect()).collect();
        let unit = match self.slowest(&self.links(classes, &everywhere)) {
            0.0 => 1.0,
            unit => unit,
        };
        let all = needed.max(1) as f64;
        let solve = |limit: Option<f64>| -> Result<(Vec<Vec<f64>>, f64), PlacementError> {
            let mut lp = Problem::new(OptimizationDirection::Minimize);
            let weight = |slow: f64| if limit.is_some() { slow } else { 0.0 };
            let x: Vec<Vec<Variable>> = classes
                .iter()
                .map(|c| {
                    let bytes = c.pages as f64 * c.page_bytes as f64 / all;
                    (0..tiers).map(|tier| lp.add_var(weight(tier as f64 * bytes), (0.0, 1.0))).collect()
                })
                .collect();
            let top = limit.map_or(f64::INFINITY, |limit| limit.max(self.compute / unit));
            let time = lp.add_var(if limit.is_some() { 0.0 } else { 1.0 }, (self.compute / unit, top));
            for x in &x {
                lp.add_constraint(x.iter().map(|x| (*x, 1.0)).collect::<Vec<_>>(), ComparisonOp::Eq, 1.0);
            }
            for tier in 0..tiers {
                let held: Vec<(Variable, f64)> = classes
                    .iter()
                    .zip(&x)
                    .map(|(c, x)| (x[tier], c.pages as f64 * c.page_bytes as f64 / all))
                    .collect();
                lp.add_constraint(held, ComparisonOp::Le, self.capacity(tier) as f64 / all);
            }
            for link in 0..self.tiers.len() {
                for up in [true, false] {
                    let mut busy = vec![(time, -1.0)];
                    for (class, x) in classes.iter().zip(&x) {
                        let (read, write) = self.stream(class, link);
                        let all = class.pages as f64 * if up { read } else { write } / unit;
                        let on = (0..tiers).filter(|tier| self.path(*tier).any(|l| l == link));
                        busy.extend(on.map(|tier| (x[tier], all)));
                    }
                    lp.add_constraint(busy, ComparisonOp::Le, 0.0);
                }
            }
            let solver = |error: microlp::Error| PlacementError::Solver(error.to_string());
            let stopped = || PlacementError::Solver("it stopped before the optimum".to_owned());
            let solution = lp.solve().map_err(solver)?.into_solution().map_err(|_| stopped())?;
            let shares = x.iter().map(|x| x.iter().map(|x| solution.var_value(*x).clamp(0.0, 1.0)).collect());
            Ok((shares.collect(), solution.var_value(time)))
        };
        let (_, time) = solve(None)?;
        let (shares, _) = solve(Some(time * (1.0 + 1e-9) + 1e-9))?;
        Ok((shares, time * unit))
    }

    /// Whole pages near `shares`; `None` if pages left over by rounding do not fit.
    fn round(&self, classes: &[Class], shares: &[Vec<f64>]) -> Option<Vec<Vec<u64>>> {
        let tiers = self.tiers.len() + 1;
        let mut room: Vec<u64> = (0..tiers).map(|tier| self.capacity(tier)).collect();
        let mut pages: Vec<Vec<u64>> = Vec::new();
        for (class, shares) in classes.iter().zip(shares) {
            let mut left = class.pages;
            let fill = room.iter_mut().zip(shares).map(|(room, share)| {
                // The solver's shares are off by up to 1e-7.
                let wanted = (share * class.pages as f64 * (1.0 + 1e-7) + 1e-6).floor() as u64;
                let n = wanted.min(left).min(*room / class.page_bytes);
                left -= n;
                *room -= n * class.page_bytes;
                n
            });
            pages.push(fill.collect());
        }
        for (c, class) in classes.iter().enumerate() {
            for _ in pages[c].iter().sum::<u64>()..class.pages {
                let fits = (0..tiers).filter(|tier| room[*tier] >= class.page_bytes);
                let mut seconds = |tier: usize| {
                    pages[c][tier] += 1;
                    let seconds = self.slowest(&self.links(classes, &pages));
                    pages[c][tier] -= 1;
                    seconds
                };
                let best = fits.map(|tier| (seconds(tier), tier)).min_by(|a, b| a.0.total_cmp(&b.0))?.1;
                pages[c][best] += 1;
                room[best] -= class.page_bytes;
            }
        }
        Some(pages)
    }

    fn too_small(&self, classes: &[Class], needed: u64, capacity: u64) -> PlacementError {
        let sizes = || classes.iter().map(|c| c.page_bytes);
        let (largest, smallest) = (sizes().max().unwrap_or(0), sizes().min().unwrap_or(0));
        // Bytes that a tier holds in any order: whole pages if all have the same size, else all but the largest page.
        let usable = |bytes: u64| {
            if largest == smallest { bytes - bytes % largest } else { bytes.saturating_sub(largest) }
        };
        let others: u64 = (0..self.tiers.len()).map(|tier| usable(self.capacity(tier))).sum();
        let margin = if largest == smallest { 0 } else { largest };
        PlacementError::Capacity {
            needed,
            capacity,
            tier: self.tiers.last().map_or_else(|| "the first tier".to_owned(), |tier| tier.name.clone()),
            would: (needed - others.min(needed)).saturating_add(margin),
        }
    }
}
