//! A token written to its page, and pages packed and unpacked.

use super::{DIM, on_all_lanes, pages};
use crate::machine;
use criterion::{Criterion, Throughput};
use pikv::codec::Code;
use pikv::lanes::Lanes;
use pikv::shape::PAGE;
use pikv::{Dtype, Layout, Position};
use pikv_core::codec::packed::Packed;
use pikv_core::warp::LANES;
use pikv_lanes::pack::{Channels, pack, unpack};
use std::hint::black_box;

/// A token's key and value, coded and written. Rates are of stored bytes.
pub fn writing(c: &mut Criterion) {
    let mut group = c.benchmark_group("write a token");
    for dtype in Dtype::ALL {
        let layout = Layout::new(DIM, dtype);
        let (mut words, row) =
            (vec![0; layout.words() as usize], machine::noise(1).take(DIM as usize).collect::<Vec<_>>());
        layout.write(&mut words, 3, Position(3), &row, &row).expect("noise is finite");
        let mut back = vec![0.0; DIM as usize];
        layout.read_key(&words, 3, &mut back);
        assert!(
            back.iter()
                .zip(&row)
                .all(|(b, x)| Some(b.to_bits()) == dtype.encode(*x).map(|e| dtype.decode(e).to_bits()))
        );
        group.throughput(Throughput::Bytes(u64::from(2 * DIM * dtype.bits() / 8)));
        let mut lane = 0;
        group.bench_function(dtype.name(), |b| {
            b.iter(|| {
                lane = (lane + 1) % PAGE;
                layout.write(black_box(&mut words), lane, Position(lane), &row, &row)
            });
        });
    }
}

/// A full page of f32, unpacked to channels and packed. Rates are of the page's bytes.
pub fn packing(c: &mut Criterion) {
    let layout = Layout::new(DIM, Dtype::F32);
    let page = pages(&layout).swap_remove(0);
    let positions: Vec<u32> = (0..PAGE).collect();
    let [mut k, mut v] = [(); 2].map(|()| vec![[0.0f32; LANES]; DIM as usize]);
    let mut group = c.benchmark_group("unpack and pack a page");
    group.throughput(Throughput::Bytes(layout.bytes()));
    for code in [Code::Int8, Code::Int4, Code::Int2, Code::E4m3, Code::Mxfp4] {
        let packed = Packed::new(DIM, DIM, code, code);
        let run = |lanes: Lanes, out: &mut [u32]| {
            unpack(lanes, &layout, &page, PAGE, &mut k, &mut v);
            let [k, v] = [&mut k, &mut v].map(|rows| Channels { rows, map: None });
            pack(lanes, &packed, &positions, k, v, out);
        };
        on_all_lanes(&mut group, code.name(), packed.words() as usize, run);
    }
}
