//! Placement in tiers, compared with an exhaustive search.

use pikv::planner::flexgen::{Class, Machine, PlacementError, Tier, TierPlacement};
use proptest::prelude::*;

fn tier(name: &str, capacity: u64, read: f64, write: f64, direct: bool) -> Tier {
    Tier::new(name, capacity, read, write).direct(direct)
}

fn class(name: &str, pages: u64, page_bytes: u64, read: f64, write: f64) -> Class {
    Class::new(name, pages, page_bytes).read(read).write(write)
}

/// Seconds of a step, stream by stream; `None` if a tier overflows.
fn seconds(machine: &Machine, classes: &[Class], pages: &[Vec<u64>]) -> Option<f64> {
    let mut held = vec![0; machine.tiers.len() + 1];
    let (mut up, mut down) = (vec![0.0; machine.tiers.len()], vec![0.0; machine.tiers.len()]);
    for (class, pages) in classes.iter().zip(pages) {
        for (at, n) in pages.iter().enumerate() {
            held[at] += n * class.page_bytes;
            // From the page's own link up, until one ends in the first tier.
            let mut link = at;
            while link > 0 {
                let tier = &machine.tiers[link - 1];
                let bytes = (n * class.page_bytes) as f64;
                up[link - 1] += bytes * class.read / tier.read;
                down[link - 1] += bytes * class.write / tier.write;
                link = if tier.direct { 0 } else { link - 1 };
            }
        }
    }
    let capacities = std::iter::once(machine.fast).chain(machine.tiers.iter().map(|t| t.capacity));
    let fits = held.iter().zip(capacities).all(|(held, capacity)| *held <= capacity);
    fits.then(|| up.into_iter().chain(down).fold(machine.compute, f64::max))
}

/// Every way to deal `n` pages to `tiers` tiers.
fn deals(n: u64, tiers: usize) -> Vec<Vec<u64>> {
    if tiers == 1 {
        return vec![vec![n]];
    }
    (0..=n)
        .flat_map(|first| {
            deals(n - first, tiers - 1).into_iter().map(move |rest| [vec![first], rest].concat())
        })
        .collect()
}

/// The fastest placement in whole pages.
fn best(machine: &Machine, classes: &[Class]) -> Option<f64> {
    let mut all: Vec<Vec<Vec<u64>>> = vec![Vec::new()];
    for class in classes {
        let deals = deals(class.pages, machine.tiers.len() + 1);
        all = all
            .iter()
            .flat_map(|begun| deals.iter().map(move |deal| [begun.clone(), vec![deal.clone()]].concat()))
            .collect();
    }
    all.iter().filter_map(|pages| seconds(machine, classes, pages)).min_by(f64::total_cmp)
}

/// A page of each class in each tier may lie on the wrong side of a share, on any link.
fn rounding(machine: &Machine, classes: &[Class]) -> f64 {
    let page = |class: &Class| {
        let link = |t: &Tier| class.page_bytes as f64 * (class.read / t.read).max(class.write / t.write);
        machine.tiers.iter().map(link).fold(0.0, f64::max) * (machine.tiers.len() + 1) as f64
    };
    classes.iter().map(page).sum()
}

fn sound(machine: &Machine, classes: &[Class], placement: &TierPlacement) {
    for (class, pages) in classes.iter().zip(&placement.pages) {
        assert_eq!(pages.iter().sum::<u64>(), class.pages);
    }
    let seconds = seconds(machine, classes, &placement.pages).expect("within the capacities");
    assert!((seconds - placement.seconds).abs() <= 1e-12 * seconds);
    let slowest = placement.links.iter().fold(machine.compute, |s, (up, down)| s.max(*up).max(*down));
    assert_eq!(slowest, placement.seconds);
    assert!(placement.bound <= seconds * (1.0 + 1e-6) + 1e-9);
    assert!(placement.seconds <= placement.bound + rounding(machine, classes) + 1e-9);
}

fn machines() -> impl Strategy<Value = Machine> {
    let rate = || 1.0f64..50.0;
    let numbers = (0u64..12, rate(), rate(), any::<bool>());
    (0u64..12, prop::collection::vec(numbers, 1..3), prop::sample::select(vec![0.0, 0.5, 4.0])).prop_map(
        |(fast, tiers, compute)| {
            let name = |i: usize| ["host", "file"][i];
            let tiers = tiers
                .into_iter()
                .enumerate()
                .map(|(i, (capacity, read, write, direct))| tier(name(i), capacity, read, write, direct));
            Machine::new(fast, tiers.collect()).compute(compute)
        },
    )
}

fn classes() -> impl Strategy<Value = Vec<Class>> {
    let share = prop::sample::select(vec![0.0, 0.24, 1.0]);
    let class = (1u64..7, 1u64..4, share, prop::sample::select(vec![0.0, 0.1, 1.0]));
    prop::collection::vec(
        class.prop_map(|(n, bytes, read, write)| self::class("pages", n, bytes, read, write)),
        1..3,
    )
}

proptest! {
    #![proptest_config(pikv_test::cases(150, 300))]

    #[test]
    fn against_every_placement(machine in machines(), classes in classes()) {
        match (machine.place(&classes), best(&machine, &classes)) {
            (Ok(placement), Some(least)) => {
                sound(&machine, &classes, &placement);
                prop_assert!(placement.bound <= least * (1.0 + 1e-6) + 1e-6, "{placement:?} {least}");
                prop_assert!(placement.seconds >= least * (1.0 - 1e-12));
                prop_assert!(placement.seconds <= least + rounding(&machine, &classes) + 1e-6, "{placement:?} {least}");
            }
            (Err(PlacementError::Capacity { needed, capacity, tier, would }), least) => {
                let equal = classes.iter().all(|c| c.page_bytes == classes[0].page_bytes);
                // Pages of several sizes may fit only in an order that rounding does not find; that is said too.
                prop_assert!(least.is_none() || !equal, "{least:?}");
                prop_assert_eq!(needed, classes.iter().map(|c| c.pages * c.page_bytes).sum::<u64>());
                prop_assert_eq!(capacity, machine.fast + machine.tiers.iter().map(|t| t.capacity).sum::<u64>());
                let mut larger = machine.clone();
                let last = larger.tiers.last_mut().unwrap();
                prop_assert_eq!(&last.name, &tier);
                prop_assert!(would > last.capacity);
                last.capacity = would;
                let placement = larger.place(&classes).unwrap();
                sound(&larger, &classes, &placement);
                if equal {
                    larger.tiers.last_mut().unwrap().capacity = would - 1;
                    prop_assert!(larger.place(&classes).is_err(), "less would have done");
                }
            }
            (Ok(placement), None) => prop_assert!(false, "{placement:?} where nothing fits"),
            (Err(error), _) => prop_assert!(false, "{error}"),
        }
    }
}

/// Tens of thousands of pages: the continuous optimum is computed by hand.
#[test]
fn two_links_share_the_rest() {
    let page = 16_512;
    let pool = [class("pool", 40_000, page, 1.0, 0.0)];
    let mut machine = Machine::new(
        10_000 * page,
        vec![tier("host", u64::MAX / 4, 20e9, 20e9, true), tier("file", u64::MAX / 4, 5e9, 2e9, true)],
    )
    .compute(1e-3);
    // Links of their own: they end together, 4 pages of 5 on the faster.
    let placement = machine.place(&pool).unwrap();
    sound(&machine, &pool, &placement);
    assert_eq!(placement.pages, [[10_000, 24_000, 6_000]]);
    // Through the host, a file only adds.
    machine.tiers[1].direct = false;
    let placement = machine.place(&pool).unwrap();
    assert_eq!(placement.pages, [[10_000, 30_000, 0]]);
    assert!((placement.seconds / (30_000.0 * page as f64 / 20e9) - 1.0).abs() < 1e-9);
    // Compute takes longer than all links: pages that fit in fast tiers stay there all the same.
    machine.compute = 1.0;
    assert_eq!(machine.place(&pool).unwrap().pages, [[10_000, 30_000, 0]]);
    // Until the host is full.
    machine.tiers[0].capacity = 20_000 * page;
    assert_eq!(machine.place(&pool).unwrap().pages, [[10_000, 20_000, 10_000]]);
}

/// Pages that are always read take the first tier before pages that are seldom read.
#[test]
fn what_is_read_most_stays_up() {
    let machine = Machine::new(1000, vec![tier("host", 1 << 20, 1e3, 1e3, false)]);
    let classes = [class("pool", 100, 10, 0.242, 0.0), class("ring", 50, 10, 1.0, 0.02)];
    let placement = machine.place(&classes).unwrap();
    sound(&machine, &classes, &placement);
    assert_eq!(placement.pages, [[50, 50], [50, 0]]);
}

#[test]
fn numbers_out_of_range() {
    let fine = Machine::new(100, vec![tier("host", 100, 1.0, 1.0, false)]);
    let pages = [class("pool", 1, 10, 1.0, 0.0)];
    fine.place(&pages).unwrap();
    let refused = |machine: &Machine, classes: &[Class]| match machine.place(classes).unwrap_err() {
        PlacementError::Value { what, name, .. } => (what, name),
        other => panic!("{other}"),
    };
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mut machine = fine.clone();
        machine.tiers[0].read = rate;
        assert_eq!(refused(&machine, &pages), ("read rate", "host".into()));
        let mut machine = fine.clone();
        machine.tiers[0].write = rate;
        assert_eq!(refused(&machine, &pages), ("write rate", "host".into()));
    }
    for share in [-0.1, f64::NAN, f64::INFINITY] {
        assert_eq!(refused(&fine, &[class("pool", 1, 10, share, 0.0)]).0, "share read");
        assert_eq!(refused(&fine, &[class("pool", 1, 10, 1.0, share)]).0, "share written");
        assert_eq!(refused(&fine.clone().compute(share), &pages).0, "seconds");
    }
    assert_eq!(refused(&fine, &[class("pool", 1, 0, 1.0, 0.0)]).0, "bytes of a page");
    // No pages to place, and no tiers to place them in.
    assert_eq!(fine.place(&[]).unwrap().seconds, 0.0);
    let alone = Machine::new(100, Vec::new()).compute(2.0);
    assert_eq!(alone.place(&pages).unwrap().pages, [[1]]);
    assert_eq!(
        alone.place(&[class("pool", 11, 10, 1.0, 0.0)]).unwrap_err().to_string(),
        "110 bytes of pages, 100 in all tiers: whole pages fit if the first tier has 110 bytes"
    );
}
