//! Addresses in a page, and writes and reads of tokens.

use half::{bf16, f16};
use pikv_core::dtype::Dtype;
use pikv_core::page::{Layout, MAX_DIM, NO_POSITION, PAGE, Position, Slot, Unstorable};
use std::collections::{BTreeSet, HashSet};

fn dtype_pairs() -> impl Iterator<Item = (Dtype, Dtype)> {
    Dtype::ALL.into_iter().flat_map(|k| Dtype::ALL.map(|v| (k, v)))
}

/// Layouts with every width of K, and widths of V that differ from it.
fn layouts() -> impl Iterator<Item = Layout> {
    (1..=MAX_DIM).flat_map(|k_dim| {
        dtype_pairs().map(move |(k, v)| Layout::new(k_dim, k).values((k_dim * 37 + 11) % MAX_DIM + 1, v))
    })
}

/// Layouts at the widths at which a word, a sector of 8 words or a group of 32 words is full.
fn corners() -> impl Iterator<Item = Layout> {
    [(1, 1), (2, 3), (16, 15), (17, 64), (64, 65), (80, 96), (128, 128), (255, 129), (256, 256), (96, 33)]
        .into_iter()
        .flat_map(|(k_dim, v_dim)| dtype_pairs().map(move |(k, v)| Layout::new(k_dim, k).values(v_dim, v)))
}

/// The layout as the documentation draws it, in u128.
struct Drawn {
    k_per_word: u128,
    v_per_word: u128,
    v_base: u128,
    v_stride: u128,
    words: u128,
}

fn drawn(layout: &Layout) -> Drawn {
    let per_word = |dtype| if dtype == Dtype::F32 { 1 } else { 2 };
    let (k_per_word, v_per_word) = (per_word(layout.k), per_word(layout.v));
    let k_rows = u128::from(layout.k_dim).div_ceil(k_per_word);
    let v_stride = u128::from(layout.v_dim).div_ceil(v_per_word).div_ceil(8) * 8;
    let v_base = 32 + 32 * k_rows;
    Drawn { k_per_word, v_per_word, v_base, v_stride, words: v_base + 32 * v_stride }
}

#[test]
fn addresses_are_exact_past_32_bits() {
    for layout in layouts().chain(corners()) {
        let Drawn { k_per_word, v_per_word, v_base, v_stride, words } = drawn(&layout);
        assert_eq!(u128::from(layout.words()), words);
        let around = [1u64 << 31, 1 << 32, 1 << 33].map(|n| n / words as u64);
        let pages = [0, 1, 131_071, 131_072, 1_000_000_000, u64::from(u32::MAX) + 7];
        for page in pages.into_iter().chain(around.into_iter().flat_map(|p| [p - 1, p, p + 1])) {
            let first = u128::from(page) * words;
            assert_eq!(u128::from(layout.page_word(page)), first);
            for lane in [0, 1, 15, 31] {
                for channel in [0, 1, 2, layout.k_dim / 2, layout.k_dim - 1] {
                    let want = first + 32 + u128::from(channel) / k_per_word * 32 + u128::from(lane);
                    assert_eq!(
                        u128::from(layout.k_word(page, channel, lane)),
                        want,
                        "{layout:?} page {page}"
                    );
                }
                for channel in [0, 1, 2, layout.v_dim / 2, layout.v_dim - 1] {
                    let want =
                        first + v_base + u128::from(lane) * v_stride + u128::from(channel) / v_per_word;
                    assert_eq!(
                        u128::from(layout.v_word(page, channel, lane)),
                        want,
                        "{layout:?} page {page}"
                    );
                }
            }
        }
    }
    // Elements and words past 2^31 and 2^32, where 32-bit arithmetic would overflow.
    let layout = Layout::new(256, Dtype::F32);
    assert_eq!(layout.v_word(1_000_000_000, 255, 31), 1_000_000_000 * 16_416 + 16_415);
}

#[test]
fn every_address_of_a_page_is_inside_it_and_its_own() {
    for layout in corners() {
        let words = u64::from(layout.words());
        // Word, and the part in it.
        let mut seen: HashSet<(u64, u32)> = (0..PAGE).map(|lane| (u64::from(lane), 0)).collect();
        let mut words_seen: HashSet<u64> = (0..u64::from(PAGE)).collect();
        for lane in 0..PAGE {
            for channel in 0..layout.k_dim {
                let word = layout.k_word(0, channel, lane);
                assert!(word < words && seen.insert((word, channel % layout.k.per_word())), "{layout:?}");
                words_seen.insert(word);
            }
        }
        let before_v = words_seen.len();
        for lane in 0..PAGE {
            for channel in 0..layout.v_dim {
                let word = layout.v_word(0, channel, lane);
                assert!(word < words && seen.insert((word, channel % layout.v.per_word())), "{layout:?}");
                words_seen.insert(word);
            }
            // A row of V starts at a sector.
            assert_eq!((layout.v_word(0, 0, lane) - u64::from(layout.v_base())) % 8, 0);
        }
        // K, V and positions share no word either, and only V has padding.
        assert_eq!(before_v as u32, PAGE * (1 + layout.k_dim.div_ceil(layout.k.per_word())), "{layout:?}");
        assert_eq!(words_seen.len() as u32, layout.words() - PAGE * (layout.v_stride() - layout.v_words()));
        assert!(layout.v_stride() - layout.v_words() < 8);
        // Lane = token: the channels of K of one row are next to each other for neighbouring tokens.
        assert_eq!(layout.k_word(0, 0, 31) - layout.k_word(0, 0, 0), 31);
    }
}

#[test]
fn bytes_count_positions_and_padding() {
    for layout in layouts().chain(corners()) {
        assert_eq!(u128::from(layout.bytes()), 4 * drawn(&layout).words, "{layout:?}");
        let raw = PAGE * (layout.k_dim * layout.k.bits() + layout.v_dim * layout.v.bits()) / 8;
        assert!(layout.bytes() >= u64::from(raw + PAGE * 4));
    }
    let layout = |k_dim, v_dim, k, v| Layout::new(k_dim, k).values(v_dim, v).bytes();
    assert_eq!(layout(128, 128, Dtype::Bf16, Dtype::Bf16), 128 + 32 * 2 * 128 * 2);
    // One channel: a word of K, a sector of V.
    assert_eq!(layout(1, 1, Dtype::F32, Dtype::F32), 128 + 32 * 4 + 32 * 32);
    assert_eq!(layout(1, 1, Dtype::F16, Dtype::F16), 128 + 32 * 4 + 32 * 32);
    assert_eq!(layout(80, 80, Dtype::F16, Dtype::F32), 128 + 32 * 160 + 32 * 320);
    assert_eq!(layout(3, 17, Dtype::Bf16, Dtype::Bf16), 128 + 32 * 8 + 32 * 64);
}

fn stored(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        _ => bf16::from_f32(x).to_f32(),
    }
}

/// A value for each token and channel; `key` and value get different ones.
fn token(n: u32, key: bool, dim: u32) -> Vec<f32> {
    let x = |c: u32| (n * 521 + c * 131 + u32::from(key) * 7919) % 9973;
    (0..dim).map(|c| (x(c) as f32 - 5000.0) * 1.3e-3).collect()
}

const POISON: u32 = 0xdead_beef;

/// The words of the token at `lane`, its padding included.
fn own_words(layout: &Layout, lane: u32) -> BTreeSet<usize> {
    let k = (0..layout.k_dim).map(|c| layout.k_word(0, c, lane) as usize);
    let v = (0..layout.v_stride()).map(|i| (layout.v_base() + lane * layout.v_stride() + i) as usize);
    k.chain(v).chain([lane as usize]).collect()
}

fn write(layout: &Layout, words: &mut [u32], lane: u32, n: u32) {
    let (key, value) = (token(n, true, layout.k_dim), token(n, false, layout.v_dim));
    layout.write(words, lane, Position(n), &key, &value).unwrap();
}

#[track_caller]
fn holds(layout: &Layout, words: &[u32], lane: u32, n: u32) {
    let (mut key, mut value) = (vec![f32::NAN; layout.k_dim as usize], vec![f32::NAN; layout.v_dim as usize]);
    layout.read_key(words, lane, &mut key);
    layout.read_value(words, lane, &mut value);
    let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let want = |dtype, row: Vec<f32>| row.into_iter().map(|x| stored(dtype, x).to_bits()).collect::<Vec<_>>();
    assert_eq!(layout.position(words, lane), Some(Position(n)));
    assert_eq!(bits(&key), want(layout.k, token(n, true, layout.k_dim)), "key, {layout:?} lane {lane}");
    assert_eq!(bits(&value), want(layout.v, token(n, false, layout.v_dim)), "value, {layout:?} lane {lane}");
}

#[test]
fn what_is_written_is_read_back_rounded() {
    for layout in layouts().chain(corners()) {
        let mut words = vec![POISON; layout.words() as usize];
        // Lanes in a scrambled order; a later write must not change earlier tokens.
        let lanes = || (0..PAGE).map(|i| (i * 13 + 5) % PAGE);
        for (n, lane) in lanes().enumerate() {
            write(&layout, &mut words, lane, n as u32 * 1000);
        }
        for (n, lane) in lanes().enumerate() {
            holds(&layout, &words, lane, n as u32 * 1000);
        }
        // Overwrites a token.
        write(&layout, &mut words, 9, 77);
        holds(&layout, &words, 9, 77);
        holds(&layout, &words, 5, 0);
    }
}

#[test]
fn each_word_holds_the_channel_that_its_address_says() {
    for layout in corners() {
        let mut words = vec![POISON; layout.words() as usize];
        write(&layout, &mut words, 6, 42);
        let part = |word: u64, channel: u32, dtype: Dtype| {
            let bits = words[word as usize] >> (channel % dtype.per_word() * dtype.bits());
            dtype.decode(if dtype.per_word() == 1 { bits } else { bits & 0xffff })
        };
        for (c, x) in token(42, true, layout.k_dim).iter().enumerate() {
            assert_eq!(part(layout.k_word(0, c as u32, 6), c as u32, layout.k), stored(layout.k, *x));
        }
        for (c, x) in token(42, false, layout.v_dim).iter().enumerate() {
            assert_eq!(part(layout.v_word(0, c as u32, 6), c as u32, layout.v), stored(layout.v, *x));
        }
    }
}

#[test]
fn a_write_touches_the_words_of_its_token_only() {
    for layout in corners() {
        for lane in [0, 1, 17, 31] {
            let mut words = vec![POISON; layout.words() as usize];
            write(&layout, &mut words, lane, 3);
            let touched: BTreeSet<usize> = (0..words.len()).filter(|i| words[*i] != POISON).collect();
            assert_eq!(touched, own_words(&layout, lane), "{layout:?} lane {lane}");
            // Padding of a row, and of a last word, is 0: the write clears old content.
            for i in layout.v_words()..layout.v_stride() {
                assert_eq!(words[(layout.v_base() + lane * layout.v_stride() + i) as usize], 0);
            }
            if layout.k_dim % layout.k.per_word() != 0 {
                assert_eq!(words[layout.k_word(0, layout.k_dim - 1, lane) as usize] >> 16, 0);
            }
            if layout.v_dim % layout.v.per_word() != 0 {
                assert_eq!(words[layout.v_word(0, layout.v_dim - 1, lane) as usize] >> 16, 0);
            }
        }
    }
}

#[test]
fn a_copy_is_the_token_and_nothing_else() {
    for layout in corners() {
        let mut source = vec![POISON; layout.words() as usize];
        (0..PAGE).for_each(|lane| write(&layout, &mut source, lane, lane + 100));
        for (from, to) in [(0, 0), (0, 31), (31, 0), (7, 8), (20, 3)] {
            let mut target = vec![POISON; layout.words() as usize];
            layout.copy(&source, from, &mut target, to);
            holds(&layout, &target, to, from + 100);
            let touched: BTreeSet<usize> = (0..target.len()).filter(|i| target[*i] != POISON).collect();
            assert_eq!(touched, own_words(&layout, to), "{layout:?} {from} to {to}");
        }
    }
}

#[test]
fn what_cannot_be_stored_is_named() {
    for layout in corners() {
        let mut words = vec![0; layout.words() as usize];
        let (key, value) = (vec![1.0; layout.k_dim as usize], vec![1.0; layout.v_dim as usize]);
        let mut bad = vec![f32::INFINITY, f32::NEG_INFINITY];
        if layout.k == Dtype::F16 {
            bad.push(-65_520.0);
        }
        for x in bad {
            for channel in [0, layout.k_dim / 2, layout.k_dim - 1] {
                let mut key = key.clone();
                key[channel as usize] = x;
                let mut value = value.clone();
                value[0] = f32::NAN;
                // The error names K before V.
                let got = layout.write(&mut words, 3, Position(1), &key, &value);
                assert_eq!(got, Err(Unstorable { key: true, channel, value: x }));
            }
        }
        for channel in [0, layout.v_dim / 2, layout.v_dim - 1] {
            let mut value = value.clone();
            value[channel as usize] = f32::INFINITY;
            let got = layout.write(&mut words, 3, Position(1), &key, &value);
            assert_eq!(got, Err(Unstorable { key: false, channel, value: f32::INFINITY }));
        }
    }
}

#[test]
fn positions_and_slots() {
    assert_eq!(Position(7).to_string(), "7");
    let layout = Layout::new(1, Dtype::F32);
    let mut words = vec![NO_POSITION; layout.words() as usize];
    assert_eq!(layout.position(&words, 4), None);
    for p in [Position(0), Position(1), Position::MAX] {
        layout.write(&mut words, 4, p, &[1.0], &[2.0]).unwrap();
        assert_eq!(layout.position(&words, 4), Some(p));
        assert_eq!(layout.position(&words, 5), None);
        assert_eq!(Slot::from(p), Slot { tile: p.0 / 32, lane: p.0 % 32 });
    }
    // Positions are compared as signed words.
    assert!((Position::MAX.0 + 1) as i32 > 0);
}
