//! The ring against a queue.

use pikv_core::page::{PAGE, Position, Resident};
use pikv_core::ring::Ring;
use std::collections::BTreeSet;

#[test]
fn the_ring_is_what_a_queue_would_be() {
    for window in 1..=70u32 {
        for slack in 0..=40u32 {
            let ring = Ring::new(window, slack).unwrap();
            assert_eq!((ring.window(), ring.slack()), (window, slack));
            // First position in the ring, and first one kept, as tokens are added one by one.
            let (mut left, mut kept) = (0, 0);
            for len in 0..=300u32 {
                if len > 0 {
                    let token = len - 1;
                    // A token sees `window` tokens in the ring, itself included; `slack` more are kept.
                    while token - left + 1 > window {
                        left += 1;
                    }
                    while token - kept + 1 > window + slack {
                        kept += 1;
                    }
                }
                assert_eq!(ring.left(len), left, "{ring:?} at {len}");
                assert_eq!(ring.kept_from(len), kept, "{ring:?} at {len}");
                assert_eq!(ring.resident(len), Resident(len - left), "{ring:?} at {len}");
                let tiles: BTreeSet<u32> = (kept..len).map(|p| p / PAGE).collect();
                let got = ring.tiles(len, len);
                assert!(
                    got.clone().eq(tiles.iter().copied()),
                    "{ring:?} at {len}: {got:?}, expected {tiles:?}"
                );
                assert_eq!(ring.pages(len), tiles.len() as u32, "{ring:?} at {len}");
                // After a rollback of up to `slack`, every token of the shorter ring is still kept.
                for back in [0, slack / 2, slack] {
                    assert!(kept <= ring.left(len.saturating_sub(back)), "{ring:?} at {len}, {back} back");
                }
            }
        }
    }
}

#[test]
fn a_ring_that_grows_keeps_all_of_its_tiles() {
    for (window, slack) in [(1, 0), (1, 40), (31, 0), (32, 0), (33, 1), (48, 16), (64, 32)] {
        let ring = Ring::new(window, slack).unwrap();
        for from in 0..=150u32 {
            for to in from..=from + 100 {
                let tiles: BTreeSet<u32> = (ring.kept_from(from)..to).map(|p| p / PAGE).collect();
                assert!(ring.tiles(from, to).eq(tiles), "{ring:?} from {from} to {to}");
            }
        }
    }
}

#[test]
fn a_ring_needs_a_token_and_ends_with_the_positions() {
    let max = Position::MAX.0;
    for (window, slack) in
        [(0, 0), (0, 5), (max, 1), (1, max), (max + 1, 0), (u32::MAX, u32::MAX), (u32::MAX, 1)]
    {
        assert_eq!(Ring::new(window, slack), None, "{window} and {slack}");
    }
    for (window, slack) in [(1, 0), (max, 0), (1, max - 1)] {
        let ring = Ring::new(window, slack).unwrap();
        assert_eq!(ring.left(max), max - window);
        assert_eq!(ring.kept_from(max), max - window - slack);
        assert_eq!(ring.pages(max), max.div_ceil(32) - (max - window - slack) / 32);
        assert_eq!(ring.pages(0), 0);
    }
}
