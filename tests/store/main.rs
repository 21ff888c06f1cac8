//! Writing and copying tokens by lanes gives the bits of [`Layout::write`] and [`Layout::copy`], on all lanes.

use pikv::lanes::Lanes;
use pikv_core::dtype::Dtype;
use pikv_core::page::{Layout, Position};
use pikv_core::store;
use pikv_core::warp::{Kernel, LANES, Warp};
use proptest::prelude::*;

struct Append<'a> {
    layout: &'a Layout,
    page: &'a mut [u32],
    lane: u32,
    key: &'a [f32],
    value: &'a [f32],
}

impl Kernel for Append<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let Append { layout, page, lane, key, value } = self;
        store::append(w, layout, bytemuck::cast_slice_mut(page), lane, 77, key, value);
    }
}

struct Copy<'a>(&'a Layout, &'a [u32], u32, &'a mut [u32], u32);

impl Kernel for Copy<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let Copy(layout, source, from, target, to) = self;
        store::copy(w, layout, bytemuck::cast_slice(source), from, bytemuck::cast_slice_mut(target), to);
    }
}

/// Any finite value that f16 holds; ties and subnormals among them.
fn value() -> impl Strategy<Value = f32> {
    let bits = any::<u32>().prop_map(f32::from_bits);
    let half = (any::<u16>(), -1i32..=1).prop_map(|(x, by)| {
        let tie = (half::f16::from_bits(x).to_f32().to_bits() as i32).wrapping_add(1 << 12).wrapping_add(by);
        f32::from_bits(tie as u32)
    });
    let near = (any::<bool>(), 0x3280_0000u32..0x3880_0000)
        .prop_map(|(minus, x)| f32::from_bits(x | u32::from(minus) << 31));
    prop_oneof![bits, half, near, Just(-0.0f32), Just(65519.996), Just(5.960_464_5e-8), Just(2.980_232_2e-8)]
        .prop_map(|x| if Dtype::F16.encode(x).is_some() && Dtype::Bf16.encode(x).is_some() { x } else { 0.5 })
}

fn row() -> impl Strategy<Value = (u32, Vec<f32>)> {
    prop_oneof![Just(1u32), Just(33), Just(64), Just(80), Just(256), 1..=256u32]
        .prop_flat_map(|dim| (Just(dim), prop::collection::vec(value(), dim as usize)))
}

proptest! {
    #[test]
    fn writes_and_copies_as_one_thread_does(
        (k_dim, key) in row(), (v_dim, value) in row(), k in 0..3usize, v in 0..3usize, lane in 0..32u32, to in 0..32u32,
    ) {
        let layout = Layout::new(k_dim, Dtype::ALL[k]).values(v_dim, Dtype::ALL[v]);
        let empty = vec![u32::MAX; layout.words() as usize];
        let mut want = empty.clone();
        layout.check(&key, &value).expect("they fit");
        layout.write(&mut want, lane, Position(77), &key, &value).expect("they fit");
        let mut copied = empty.clone();
        layout.copy(&want, lane, &mut copied, to);
        for lanes in Lanes::available() {
            let mut page = empty.clone();
            lanes.run(Append { layout: &layout, page: &mut page, lane, key: &key, value: &value });
            prop_assert!(page == want, "{} lanes, {layout:?}", lanes.name());
            let mut page = empty.clone();
            lanes.run(Copy(&layout, &want, lane, &mut page, to));
            prop_assert!(page == copied, "{} lanes, {layout:?}", lanes.name());
        }
    }
}

/// Every f16 and every bf16 and the midpoints between neighbours: all cases of rounding.
#[test]
fn rounds_as_half_does() {
    for (dtype, steps) in [(Dtype::F16, 13u32), (Dtype::Bf16, 16)] {
        let layout = Layout::new(256, dtype).values(1, dtype);
        let values: Vec<f32> = (0..=u16::MAX)
            .flat_map(|x| {
                let value = dtype.decode(u32::from(x)).to_bits();
                [0, 1, 1 << (steps - 1), (1 << (steps - 1)) - 1, (1 << (steps - 1)) + 1]
                    .map(|by| value.wrapping_add(by))
            })
            .map(f32::from_bits)
            .filter(|x| dtype.encode(*x).is_some())
            .collect();
        for keys in values.chunks_exact(256) {
            let mut want = vec![0; layout.words() as usize];
            layout.write(&mut want, 5, Position(77), keys, &[0.0]).expect("they fit");
            let mut page = vec![0; want.len()];
            Lanes::detect().run(Append {
                layout: &layout,
                page: &mut page,
                lane: 5,
                key: keys,
                value: &[0.0],
            });
            assert_eq!(page[LANES..], want[LANES..]);
        }
    }
}
