//! EPLB, and the auxiliary losses.

use crate::{KINDS, SHAPES, logits, mix, plain};
use pikv::lanes::Lanes;
use pikv::router::{Auxiliary, Eplb, EplbError, RouteError, Shape, auxiliary};

const LOADS: [[f64; 12]; 2] = [
    [90.0, 132.0, 40.0, 61.0, 104.0, 165.0, 39.0, 4.0, 73.0, 56.0, 183.0, 86.0],
    [20.0, 107.0, 104.0, 64.0, 19.0, 197.0, 187.0, 157.0, 172.0, 86.0, 16.0, 27.0],
];

#[test]
fn eplb_gives_the_published_example() {
    let want = [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ];
    for (loads, want) in LOADS.iter().zip(want) {
        let placement = Eplb::hierarchical(16, 4, 2, 8).place(loads).unwrap();
        assert_eq!(placement.expert_of, want);
    }
    let placement = Eplb::hierarchical(16, 4, 2, 8).place(&LOADS[0]).unwrap();
    assert_eq!(placement.counts(), [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]);
    assert_eq!((&placement.slots_of[5][..], &placement.slots_of[3][..]), (&[0, 2][..], &[6][..]));
}

#[test]
fn eplb_places_every_expert() {
    for (experts, e) in [
        (12, Eplb::global(16, 8)),
        (12, Eplb::global(12, 4)),
        (64, Eplb::hierarchical(96, 8, 4, 16)),
        (64, Eplb::hierarchical(64, 8, 2, 8)),
        (256, Eplb::hierarchical(288, 8, 4, 32)),
        (1, Eplb::global(8, 4)),
        (7, Eplb::hierarchical(14, 1, 1, 7)),
    ] {
        for salt in 0..6 {
            let load = |i: usize| match salt {
                0 => 1.0,
                1 => 0.0,
                2 => {
                    if i == 0 {
                        1e6
                    } else {
                        1.0
                    }
                }
                _ => (mix(salt << 32 | i as u64) % 1000) as f64,
            };
            let loads: Vec<f64> = (0..experts).map(load).collect();
            let placement = e.place(&loads).unwrap();
            let counts = placement.counts();
            assert_eq!(placement.expert_of.len(), e.replicas as usize);
            assert!(counts.iter().all(|n| *n >= 1));
            assert_eq!(counts.iter().sum::<u32>(), e.replicas);
            let mut seen = vec![false; e.replicas as usize];
            for (expert, slots) in placement.slots_of.iter().enumerate() {
                for slot in slots {
                    assert_eq!(placement.expert_of[*slot as usize], expert as u32);
                    assert!(!std::mem::replace(&mut seen[*slot as usize], true));
                }
            }
            // Each group on one node.
            let size = experts / e.groups as usize;
            let slots = (e.replicas / e.nodes) as usize;
            for group in placement.slots_of.chunks(size) {
                let nodes: Vec<usize> = group.iter().flatten().map(|s| *s as usize / slots).collect();
                assert!(nodes.iter().all(|n| *n == nodes[0]));
            }
            // On each node the replication is greedy: no expert's load a replica, with one replica fewer, is below the most
            // that any other has now.
            let share = |i: usize, less: u32| loads[i] / f64::from(counts[i] - less);
            for a in (0..experts).filter(|i| counts[*i] > 1) {
                for b in 0..experts {
                    if placement.slots_of[a][0] as usize / slots == placement.slots_of[b][0] as usize / slots
                    {
                        assert!(share(a, 1) >= share(b, 0), "expert {a} before {b}");
                    }
                }
            }
        }
    }
}

#[test]
fn eplb_refuses_what_does_not_divide() {
    let loads = [1.0; 12];
    let place = |e: Eplb| e.place(&loads).unwrap_err();
    assert_eq!(place(Eplb::global(8, 8)), EplbError::Replicas { replicas: 8, experts: 12 });
    assert!(matches!(place(Eplb::global(16, 5)), EplbError::Uneven { what: "replicas", over: 5, .. }));
    assert!(matches!(place(Eplb::hierarchical(16, 5, 1, 8)), EplbError::Uneven { what: "experts", .. }));
    assert!(matches!(place(Eplb::hierarchical(16, 3, 2, 8)), EplbError::Uneven { what: "groups", .. }));
    assert!(matches!(place(Eplb::hierarchical(15, 4, 2, 5)), EplbError::Uneven { what: "devices", .. }));
    assert_eq!(place(Eplb::hierarchical(16, 4, 0, 8)), EplbError::Zero("nodes"));
    assert_eq!(place(Eplb::global(0, 1)), EplbError::Zero("replicas"));
    assert_eq!(Eplb::global(4, 2).place(&[]).unwrap_err(), EplbError::Zero("experts"));
    let err = Eplb::global(4, 2).place(&[1.0, -2.0]).unwrap_err();
    assert_eq!(err, EplbError::Load { expert: 1, load: -2.0 });
    assert!(matches!(Eplb::global(4, 2).place(&[f64::NAN]), Err(EplbError::Load { expert: 0, .. })));
}

#[test]
fn auxiliary_losses_are_their_formulas() {
    for (experts, top_k) in SHAPES {
        for kind in 0..KINDS {
            let (e, k, rows) = (experts as usize, top_k as usize, 17);
            let x = logits(kind, 4, rows, e);
            let chosen: Vec<u16> = x.chunks(e).flat_map(|x| plain(x, k)).collect();
            let (mut z, mut p) = (0.0, vec![0.0; e]);
            for x in x.chunks(e) {
                let top = x.iter().copied().fold(f32::MIN, f32::max);
                let sum: f64 = x.iter().map(|x| f64::from(x - top).exp()).sum();
                z += (f64::from(top) + sum.ln()).powi(2) / rows as f64;
                x.iter().zip(&mut p).for_each(|(x, p)| *p += f64::from(x - top).exp() / sum / rows as f64);
            }
            let f = |i: usize| {
                chosen.iter().filter(|c| usize::from(**c) == i).count() as f64 / chosen.len() as f64
            };
            let want = e as f64 * (0..e).map(|i| f(i) * p[i]).sum::<f64>();
            let got: Vec<Auxiliary> = Lanes::available()
                .map(|lanes| auxiliary(Shape::new(experts, top_k).lanes(lanes), &x, &chosen).unwrap())
                .collect();
            assert!(got.iter().all(|a| *a == got[0]));
            let Auxiliary { load_balance, z: got, .. } = got[0];
            assert!((load_balance - want).abs() <= 1e-5 * want, "{load_balance}, {want}");
            assert!((got - z).abs() <= 1e-5 * z.max(1.0), "{got}, {z}");
        }
    }
    let shape = Shape::new(4, 1);
    // All on one expert, and sure of it.
    let worst = auxiliary(shape, &[200.0, 0.0, 0.0, 0.0].repeat(3), &[0; 3]).unwrap();
    assert_eq!((worst.load_balance, worst.z), (4.0, 40000.0));
    assert_eq!(auxiliary(shape, &[], &[]).unwrap(), Auxiliary::default());
    let err = auxiliary(shape, &[0.0; 8], &[0, 4]).unwrap_err();
    assert_eq!(err, RouteError::Expert { row: 1, expert: 4, experts: 4 });
    let err = auxiliary(shape, &[0.0; 8], &[0]).unwrap_err();
    assert!(matches!(err, RouteError::Length { what: "chosen", got: 1, expected: 2, .. }));
}
