//! Modules of kernels: which a cache loads, when, and what an error says where one does not load.

use crate::script::{Op, Options, Run};
use crate::standin::{Get, Set, Standin};
use crate::suite::{config, decode, shape};
use pikv::closed_loop::ClosedLoop;
use pikv::codec::{Code, Codec, Coding};
use pikv::cuda::CudaError;
use pikv::router::{Router, Shape, TopK};
use pikv::{Backend, Cache, CacheConfig, Dtype, Error, LayerShape, Rope};
use std::ffi::CStr;

/// A kernel of each module, in the order of their table.
const OF_MODULES: [&CStr; 11] = [
    c"append",
    c"attend_r1",
    c"pack_pages",
    c"fold_halves",
    c"attend_packed_r4",
    c"attend_packed_r1",
    c"attend_rebuilt_r4",
    c"attend_rebuilt_r2",
    c"attend_factors",
    c"route_r8",
    c"route_r32",
];

/// The modules that are loaded, a letter each.
fn loaded(standin: &Standin) -> String {
    OF_MODULES.iter().map(|kernel| if standin.having(kernel) > 0 { 'x' } else { '.' }).collect()
}

/// A layer with `group` query heads for each KV head.
fn layer(group: u32) -> LayerShape {
    shape(1, group, 16, 16, Dtype::Bf16, Dtype::Bf16)
}

fn rotated(group: u32) -> LayerShape {
    layer(group).rope(Some(Rope::new(100.0, 8)))
}

fn int8() -> Codec {
    Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8))
}

fn means() -> Codec {
    let coding = || Coding::means(Code::Bf16, 1).unwrap();
    Codec::new(coding(), coding())
}

/// Modules that are loaded with the device, and once a cache is built; steps that pack pages load no other.
fn modules_of(config: CacheConfig) -> String {
    let standin = Standin::new();
    let backend = standin.backend();
    assert_eq!((standin.get(Get::Compiled), loaded(&standin)), (1, "x..........".to_owned()));
    let mut last = String::new();
    for in_place in [false, true] {
        let options = Options { in_place, ..Options::default() };
        let mut run = Run::new(config.clone().backend(backend.clone()), options).unwrap();
        let compiled = standin.get(Get::Compiled);
        last = loaded(&standin);
        assert_eq!(last.matches('x').count() as u64, compiled, "a module is compiled once");
        run.act(&Op::Feed(vec![(0, 90)])).unwrap();
        decode(2).iter().for_each(|op| run.act(op).unwrap());
        assert_eq!((standin.get(Get::Compiled), loaded(&standin)), (compiled, last.clone()));
    }
    last
}

#[test]
fn a_plain_cache_needs_the_first_module_alone() {
    for (group, modules) in
        [(8, "x.........."), (4, "x.........."), (12, "x.........."), (2, "xx........."), (7, "xx.........")]
    {
        assert_eq!(modules_of(config(vec![layer(group), rotated(group)], 16, 0)), modules, "{group}");
    }
}

#[test]
fn a_codec_loads_its_modules_with_the_cache() {
    for (layer, codec, modules) in [
        (layer(4), int8(), "x.xxx......"),
        (layer(2), int8(), "xxxxxx....."),
        (rotated(4), int8(), "x.x...x...."),
        (rotated(1), int8(), "xxx...xx..."),
        (layer(4), means(), "xx.x....x.."),
        (rotated(4), means(), "xx......x.."),
    ] {
        assert_eq!(modules_of(config(vec![layer], 16, 0).compress(codec)), modules);
    }
    // Pages that a second codec packs again are read with those of the first, row by row.
    let aged = config(vec![layer(4)], 16, 0).compress(int8()).age(40, means());
    assert_eq!(modules_of(aged), "xxxxxx..x..");
}

#[test]
fn routers_load_their_modules_with_the_loop() {
    for (experts, modules) in [(8, "x........x."), (256, "x........x."), (600, "x........xx")] {
        let standin = Standin::new();
        let config = config(vec![layer(4)], 16, 0).experts(experts, 2).backend(standin.backend());
        let cache = Cache::new(config).unwrap();
        assert_eq!(loaded(&standin), "x..........");
        let routers: Vec<Box<dyn Router>> = vec![Box::new(TopK.router(Shape::new(experts, 2)).unwrap())];
        let _loop = ClosedLoop::new(cache, routers).unwrap();
        assert_eq!(loaded(&standin), modules, "{experts}");
    }
}

/// A module that does not compile gives an error with the compiler's log each time it is needed, is compiled once, and does not affect
/// caches that do not need it.
#[test]
fn a_module_that_does_not_compile() {
    let standin = Standin::new();
    let live = standin.get(Get::Live);
    let refused = |error: &CudaError, name: &str| {
        let CudaError::Module { module, code: 218, log, .. } = error else { panic!("{error:?}") };
        assert_eq!((*module, log.as_str()), (name, "stand-in: told to refuse this module"));
        let message = format!(
            "the kernels {name} do not load: the CUDA driver answers CUDA_ERROR_INVALID_PTX (218); its compiler: {log}"
        );
        assert_eq!(error.to_string(), message);
    };
    standin.set(Set::Modules, 0);
    refused(&Backend::cuda().unwrap_err(), "full");
    assert_eq!(standin.get(Get::Live), live, "something was not given back");

    let backend = standin.backend();
    let packed = config(vec![layer(4)], 16, 0).compress(int8()).backend(backend.clone());
    standin.set(Set::Modules, 0);
    let compiled = standin.get(Get::Compiled);
    for _ in 0..3 {
        let Err(Error::Device(error)) = Cache::new(packed.clone()) else { panic!("it is built") };
        refused(&error, "packed");
    }
    assert_eq!(standin.get(Get::Compiled), compiled + 1);
    // A cache that does not need it.
    let mut run = Run::new(config(vec![layer(4)], 16, 0).backend(backend), Options::default()).unwrap();
    run.act(&Op::Feed(vec![(0, 40)])).unwrap();
    // Another back end is another device.
    let again = Cache::new(packed.backend(standin.backend()));
    assert!(again.is_ok(), "{again:?}");
}
