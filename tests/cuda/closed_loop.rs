//! The closed loop: routers that learn from residency make the same choices on both back ends.

use crate::engine::Engine;
use crate::script::noise;
use crate::standin::{Get, Standin};
use crate::suite::{config, shape};
use pikv::cuda::DeviceOutput;
use pikv::policy::{Budget, Eviction, H2o};
use pikv::router::{Adaptive, CacheAware, Router, Shape};
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Backend, Cache, ClosedLoop, Dtype, ReadPages};

const EXPERTS: u32 = 4;

/// Outputs, experts and reports of a run, as bits and numbers; `in_place` with tensors of the device.
fn turns(backend: Backend, id: usize, read: ReadPages, in_place: bool) -> Vec<u64> {
    let mut engine = in_place.then(|| Engine::new(&backend));
    let layer = shape(2, 2, 8, 8, Dtype::F32, Dtype::F32);
    let mut config = config(vec![layer; 2], 8, 0)
        .sinks(2)
        .experts(EXPERTS, 2)
        .tiers(Tiers::new().host(1 << 20))
        .evict(Eviction::new(H2o, Budget::Tokens(90)).batch(4))
        .backend(backend);
    config.budget = 76 * layer.layout.bytes();
    let cache = Cache::new(config).unwrap();
    let router = |layer: u64| -> Box<dyn Router> {
        let shape = Shape::new(EXPERTS, 2);
        match id {
            0 => Box::new(CacheAware::default().router(shape).unwrap()),
            _ => Box::new(Adaptive::new(2, 3 + layer).router(shape).unwrap()),
        }
    };
    let mut pikv = ClosedLoop::new(cache.clone(), (0..2).map(router).collect()).unwrap();
    let mut sequence = cache.sequence();
    let mut record = Vec::new();
    for turn in 0..24u64 {
        let n = if turn % 3 == 0 { 12 } else { 1 };
        let mut step = pikv.begin([(&mut sequence, n as u32)]).unwrap();
        for layer in 0..2 {
            let row = |kind, n| noise(&[turn, layer as u64, kind], n);
            let routes = step.route(layer, &row(3, n * EXPERTS as usize)).unwrap();
            record.extend(routes.model().experts.iter().map(|e| u64::from(*e)));
            let (k, v, q) = (row(0, n * 16), row(1, n * 16), row(2, n * 32));
            let mut out = vec![f32::NAN; n * 32];
            let attend = Attend::new(0.4).read(read);
            if let Some(engine) = &mut engine {
                let [k, v, q] = [k, v, q].map(|values| engine.put(values));
                let to = engine.room(n * 32);
                step.append_device(layer, k, v).unwrap();
                step.attend_device(layer, q, &attend, DeviceOutput::new(to)).unwrap();
                step.check().unwrap();
                out = engine.read(to);
            } else {
                step.append(layer, &k, &v).unwrap();
                step.attend(layer, &q, &attend, AttendOutput::new(&mut out)).unwrap();
            }
            record.extend(out.iter().map(|x| u64::from(x.to_bits())));
        }
        step.commit().unwrap();
        let report = pikv.report();
        for layer in 0..2 {
            record.extend(report.hits(layer).iter().chain(report.misses(layer)).map(|pages| pages.to_bits()));
            record.push(report.remote_bytes(layer));
        }
        record.extend(report.evicted.iter().map(|e| u64::from(e.tokens)));
    }
    record.extend(cache.usage().shards.iter().chain(&[cache.usage().tiers[0].bytes]));
    record
}

#[test]
fn the_same_turns() {
    let standin = Standin::new();
    let live = standin.get(Get::Live);
    for id in 0..2 {
        for read in [ReadPages::All, ReadPages::Experts] {
            let host = turns(Backend::CPU, id, read, false);
            for in_place in [false, true] {
                assert!(host == turns(standin.backend(), id, read, in_place), "{id}, {read:?}, {in_place}");
            }
        }
    }
    assert_eq!(standin.get(Get::Live), live);
}
