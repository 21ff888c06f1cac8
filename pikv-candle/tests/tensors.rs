//! Tensors through the cache against slices through pikv: the same bits; rejected tensors; sequences after failed passes.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use pikv_candle::pikv::report::Place;
use pikv_candle::pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, AttendOutput, Scalar, Sequence};
use pikv_candle::{Error, KvCache, LayerCache, pikv};

const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const K_DIM: usize = 16;
const V_DIM: usize = 8;
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn attend() -> Attend {
    Attend::new(0.25)
}

fn cache(experts: u32) -> Cache {
    let shape = LayerShape::new(KV_HEADS as u32, HEADS as u32, K_DIM as u32, Dtype::Bf16)
        .values(V_DIM as u32, Dtype::F16);
    Cache::new(CacheConfig::new(vec![shape; LAYERS], 1 << 22).ring(32).experts(experts, 1)).unwrap()
}

/// `[batch, tokens, heads, dim]`, contiguous.
fn noise(salt: usize, batch: usize, tokens: usize, heads: usize, dim: usize, dtype: DType) -> Tensor {
    let value = |i: usize| ((i * 7919 + salt * 104_729) % 1999) as f32 / 1000.0 - 1.0;
    let values: Vec<f32> = (0..batch * tokens * heads * dim).map(value).collect();
    let x = Tensor::from_vec(values, (batch, tokens, heads, dim), &Device::Cpu).unwrap();
    x.to_dtype(dtype).unwrap()
}

/// q, k and v of a pass, contiguous token by token.
fn given(salt: usize, batch: usize, tokens: usize, dtypes: [DType; 3]) -> [Tensor; 3] {
    let of = [(HEADS, K_DIM), (KV_HEADS, K_DIM), (KV_HEADS, V_DIM)];
    [0, 1, 2].map(|i| noise(3 * salt + i, batch, tokens, of[i].0, of[i].1, dtypes[i]))
}

/// In a model's layout, heads before tokens: a view, or contiguous.
fn heads_first(x: &Tensor, contiguous: bool) -> Tensor {
    let x = x.transpose(1, 2).unwrap();
    if contiguous { x.contiguous().unwrap() } else { x }
}

/// An element type of tensors and of pikv's slices.
trait Number: Scalar + candle_core::WithDType {}
impl Number for f32 {}
impl Number for f16 {}
impl Number for bf16 {}

fn number<T: Number>() -> DType {
    <T as candle_core::WithDType>::DTYPE
}

fn slice<T: Number>(x: &Tensor) -> Vec<T> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

fn bits(x: &Tensor) -> Vec<u32> {
    let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    x.into_iter().map(f32::to_bits).collect()
}

/// A pass of pikv over slices. Returns the output of each layer, `[batch, tokens, heads, v_dim]`.
fn by_slices<Q: Number, T: Number>(
    cache: &Cache,
    sequences: &mut [Sequence],
    [q, k, v]: &[Tensor; 3],
) -> Vec<Tensor> {
    let (batch, tokens, ..) = q.dims4().unwrap();
    let mut step = cache.begin(sequences.iter_mut().map(|of| (of, tokens as u32))).unwrap();
    let mut outs = Vec::new();
    for layer in 0..LAYERS {
        let mut out = vec![Q::default(); batch * tokens * HEADS * V_DIM];
        step.append(layer, &slice::<T>(k), &slice::<T>(v)).unwrap();
        step.attend(layer, &slice::<Q>(q), &attend(), AttendOutput::new(&mut out)).unwrap();
        outs.push(Tensor::from_vec(out, (batch, tokens, HEADS, V_DIM), &Device::Cpu).unwrap());
    }
    step.commit().unwrap();
    outs
}

fn same<Q: Number, T: Number>(batch: usize, contiguous: bool) {
    let (cache, kv) = (cache(1), KvCache::new(cache(1)));
    let mut sequences: Vec<Sequence> = (0..batch).map(|_| cache.sequence()).collect();
    for (salt, tokens) in [20, 1, 1, 40, 1, 3].into_iter().enumerate() {
        let tensors = given(salt, batch, tokens, [number::<Q>(), number::<T>(), number::<T>()]);
        let want = by_slices::<Q, T>(&cache, &mut sequences, &tensors);
        let [q, k, v] = tensors.each_ref().map(|x| heads_first(x, contiguous));
        for (layer, want) in want.iter().enumerate() {
            let got = kv.layer(layer).attend(&q, &k, &v, &attend()).unwrap();
            assert_eq!(got.dims(), [batch, HEADS, tokens, V_DIM]);
            let back = got.transpose(1, 2).unwrap();
            assert!(back.is_contiguous() && back.dtype() == q.dtype());
            assert_eq!(bits(&back), bits(want), "pass {salt}, layer {layer}");
        }
    }
    assert_eq!(kv.current_seq_len(), 66);
}

#[test]
fn tensors_have_the_bits_of_slices() {
    for (batch, contiguous) in [(1, true), (1, false), (3, true), (3, false)] {
        same::<f32, f32>(batch, contiguous);
        same::<f16, bf16>(batch, contiguous);
        same::<bf16, f16>(batch, contiguous);
        same::<f32, bf16>(batch, contiguous);
    }
}

#[test]
fn a_model_with_it_may_go_to_another_thread() {
    fn goes<T: Send + Sync + Clone + std::fmt::Debug>() {}
    goes::<KvCache>();
    goes::<LayerCache>();
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let kv = KvCache::new(cache(1));
    let [q, k, v] = given(0, 2, 3, [DType::F32; 3]).map(|x| heads_first(&x, false));
    let call = |q: &Tensor, k: &Tensor, v: &Tensor| kv.attend(0, q, k, v, &attend()).unwrap_err();
    let short = |x: &Tensor, dim| x.narrow(dim, 0, 1).unwrap();
    for dim in [0, 2] {
        let refused = call(&q, &short(&k, dim), &v);
        assert!(matches!(refused, Error::Shape { what: "k", .. }), "{refused}");
    }
    let refused = call(&short(&q, 1), &k, &v);
    let (got, expected) = (vec![2, 1, 3, K_DIM], vec![2, HEADS, 3, K_DIM]);
    assert!(
        matches!(&refused, Error::Shape { what: "q", got: g, expected: e } if *g == got && *e == expected),
        "{refused}"
    );
    assert!(refused.to_string().contains("[2, 4, 3, 16]"), "{refused}");
    let refused = call(&q, &k, &k);
    assert!(matches!(refused, Error::Shape { what: "v", .. }), "{refused}");
    let refused = call(&q.to_dtype(DType::F64).unwrap(), &k, &v);
    assert!(matches!(refused, Error::Dtype { what: "q", got: DType::F64 }), "{refused}");
    let refused = call(&q.flatten(0, 1).unwrap(), &k, &v);
    assert!(matches!(refused, Error::Candle(_)), "{refused}");
    let refused = kv.attend(LAYERS, &q, &k, &v, &attend()).unwrap_err();
    assert!(matches!(refused, Error::Cache(pikv::Error::Layer { layer: 2, layers: 2 })), "{refused}");
    let wild = (k.ones_like().unwrap() / 0.0).unwrap();
    let refused = call(&q, &wild, &v);
    assert!(matches!(refused, Error::Cache(pikv::Error::Unstorable { what: "k", .. })), "{refused}");
    assert_eq!(kv.current_seq_len(), 0);
    // While nothing is held another batch can begin; afterwards it cannot.
    let pass = |batch| -> Result<(), Error> {
        let [q, k, v] = given(0, batch, 3, [DType::F32; 3]).map(|x| heads_first(&x, true));
        (0..LAYERS).try_for_each(|layer| kv.attend(layer, &q, &k, &v, &attend()).map(drop))
    };
    pass(4).unwrap();
    let refused = pass(5).unwrap_err();
    assert!(matches!(refused, Error::Batch { got: 5, held: 4 }), "{refused}");
    kv.reset();
    pass(5).unwrap();
    assert_eq!(kv.current_seq_len(), 3);
}

#[test]
fn a_pass_that_is_not_over_is_taken_back() {
    let kv = KvCache::new(cache(2));
    let gate = |rows: usize| Tensor::from_vec(vec![0.25f32; 2 * rows], (rows, 2), &Device::Cpu).unwrap();
    let layer = |layer: usize, tokens: usize| {
        let [q, k, v] = given(1, 1, tokens, DTYPES).map(|x| heads_first(&x, true));
        kv.attend(layer, &q, &k, &v, &attend())
    };
    let refused = kv.route(0, &gate(4)).unwrap_err();
    assert!(matches!(refused, Error::NotAttended { layer: 0 }), "{refused}");
    // A model that fails after its first layer, and one that fails before it routed its last: the next pass begins anew.
    let first = layer(0, 4).unwrap();
    assert_eq!(kv.current_seq_len(), 0);
    for _ in 0..2 {
        for of in 0..LAYERS {
            let got = layer(of, 4).unwrap();
            assert!(of > 0 || bits(&got) == bits(&first));
            if of == 0 {
                kv.route(of, &gate(4)).unwrap();
                let refused = kv.route(of, &gate(4)).unwrap_err();
                assert!(matches!(refused, Error::NotAttended { layer: 0 }), "{refused}");
            }
        }
    }
    assert_eq!(kv.current_seq_len(), 0);
    // A complete pass, with its layers in any order.
    for of in [1, 0] {
        layer(of, 6).unwrap();
        kv.route(of, &gate(6)).unwrap();
    }
    assert_eq!(kv.current_seq_len(), 6);
    // Weights of a gate that do not fit.
    layer(0, 1).unwrap();
    let refused = kv.route(0, &gate(2)).unwrap_err();
    assert!(matches!(refused, Error::Shape { what: "weights", .. }), "{refused}");
    assert_eq!(kv.current_seq_len(), 6);
    // Operations of pikv itself on the sequences.
    kv.sequences(|all| all[0].rollback(1)).unwrap();
    assert_eq!(kv.current_seq_len(), 5);
}

#[test]
fn a_call_that_fails_takes_the_pass_back() {
    let kv = KvCache::new(cache(2));
    let gate = |rows: usize| Tensor::from_vec(vec![0.25f32; 2 * rows], (rows, 2), &Device::Cpu).unwrap();
    let [q, k, v] = given(1, 1, 4, DTYPES).map(|x| heads_first(&x, true));
    let attended = |layer, k: &Tensor| kv.attend(layer, &q, k, &v, &attend());
    let half = || {
        attended(0, &k).unwrap();
        kv.route(0, &gate(4)).unwrap();
    };
    // If the first layer's half remained, the other half would end the pass.
    for (layer, k_of) in [(1, &q), (LAYERS, &k), (1, &k.narrow(2, 0, 3).unwrap())] {
        half();
        attended(layer, k_of).unwrap_err();
        attended(1, &k).unwrap();
        kv.route(1, &gate(4)).unwrap();
        assert_eq!(kv.current_seq_len(), 0);
    }
    for weights in [gate(3), gate(4).flatten_all().unwrap(), gate(4).to_dtype(DType::U8).unwrap()] {
        half();
        attended(1, &k).unwrap();
        kv.route(1, &weights).unwrap_err();
        let refused = kv.route(1, &gate(4)).unwrap_err();
        assert!(matches!(refused, Error::NotAttended { layer: 1 }), "{refused}");
        assert_eq!(kv.current_seq_len(), 0);
    }
    half();
    attended(1, &k).unwrap();
    kv.route(1, &gate(4)).unwrap();
    assert_eq!(kv.current_seq_len(), 4);
}

/// Runs a pass. Returns the last layer's output.
fn pass(layers: &[LayerCache], salt: usize, tokens: usize) -> Vec<u32> {
    let [q, k, v] = given(salt, 1, tokens, DTYPES).map(|x| heads_first(&x, false));
    let outs: Vec<Tensor> = layers.iter().map(|layer| layer.attend(&q, &k, &v, &attend()).unwrap()).collect();
    bits(&outs[LAYERS - 1])
}

#[test]
fn forks_go_on_by_themselves_in_the_same_model() {
    let layers = |kv: &KvCache| (0..LAYERS).map(|layer| kv.layer(layer)).collect::<Vec<LayerCache>>();
    let kv = KvCache::new(cache(1));
    let model = layers(&kv);
    pass(&model, 1, 50);
    let fork = kv.fork();
    for salt in [2, 3] {
        let fresh = layers(&KvCache::new(cache(1)));
        pass(&fresh, 1, 50);
        for tokens in [1, 20, 1] {
            assert_eq!(pass(&model, salt, tokens), pass(&fresh, salt, tokens), "{salt}");
        }
        // The model's own handles continue with the fork.
        kv.swap(&fork);
        assert!(model.iter().all(|layer| layer.all().current_seq_len() == kv.current_seq_len()));
    }
    assert_eq!((kv.current_seq_len(), fork.current_seq_len()), (72, 72));
    kv.swap(&kv.clone());
    assert_eq!(kv.current_seq_len(), 72);
}

#[test]
fn tokens_are_filed_by_the_largest_weight_of_equals_the_first() {
    for dtype in DTYPES {
        let kv = KvCache::new(cache(3));
        let weights = [[0.25, 0.5, 0.25], [0.5, 0.5, 0.0], [-1.0, -2.0, -0.5]];
        let gate: Vec<f32> = (0..90).flat_map(|i| weights[i % 3]).collect();
        let gate = Tensor::from_vec(gate, (90, 3), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        for _ in 0..2 {
            let [q, k, v] = given(1, 1, 90, DTYPES).map(|x| heads_first(&x, false));
            for layer in (0..LAYERS).map(|layer| kv.layer(layer)) {
                layer.attend(&q, &k, &v, &attend()).unwrap();
                layer.route(&gate).unwrap();
            }
        }
        let filed = |of: &mut Vec<Sequence>, place| {
            let pages = of[0].pages(1, 0).unwrap().filter(|page| page.id.place == place);
            pages.map(|page| page.tokens).sum::<u32>()
        };
        // All of the 180 tokens but the ring's 32.
        let filed = [0, 1, 2].map(|expert| kv.sequences(|of| filed(of, Place::Run(expert))));
        assert_eq!(filed, [49, 50, 49]);
        let held = kv.sequences(|of| {
            let pages = of[0].pages(1, 0).unwrap().filter(|page| page.id.place == Place::Run(0));
            pages.map(|page| page.last.0).collect::<Vec<u32>>()
        });
        // Rows 1, 4, 7.. have two equal weights, and are filed by the first.
        assert!(held.iter().all(|last| last % 3 == 1), "{held:?}");
    }
}
