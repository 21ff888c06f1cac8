//! Host tensors in f32, f16 and bf16: the bits equal those of the same values in f32, on all lanes and for all stored dtypes.

use half::{bf16, f16};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::lanes::Lanes;
use pikv::policy::{Budget, Eviction, H2o, KeyNorm, SnapKv};
use pikv::report::PageMass;
use pikv::router::{LoadBalanced, Router, Shape};
use pikv::rules::Hits;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, Error, LayerShape, Position, ReadPages,
    Rope, Rows, Scalar, Sequence, Step,
};
use pikv_test::backend::backend;
use pikv_test::cases;
use pikv_test::numbers::{Rng, bits};
use proptest::prelude::*;

const EXPERTS: u32 = 3;

/// A dtype of tensors, with the conversions of the crate `half`.
trait Number: Scalar {
    const ONE: Self;
    fn of(x: f32) -> Self;
    fn wide(self) -> f32;
}

impl Number for f32 {
    const ONE: f32 = 1.0;
    fn of(x: f32) -> f32 {
        x
    }
    fn wide(self) -> f32 {
        self
    }
}

impl Number for f16 {
    const ONE: f16 = f16::ONE;
    fn of(x: f32) -> f16 {
        f16::from_f32(x)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

impl Number for bf16 {
    const ONE: bf16 = bf16::ONE;
    fn of(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

/// Values in a dtype that is chosen at run time: all combinations are tested, and only those of one call are compiled.
#[derive(Clone, Debug)]
enum Tensor {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// Evaluates an expression of a tensor's values, of any dtype.
macro_rules! of {
    ($tensor:expr, $x:ident => $result:expr) => {
        match $tensor {
            Tensor::F32($x) => $result,
            Tensor::F16($x) => $result,
            Tensor::Bf16($x) => $result,
        }
    };
}

impl Tensor {
    fn narrow(to: Dtype, x: &[f32]) -> Tensor {
        match to {
            Dtype::F32 => Tensor::F32(x.to_vec()),
            Dtype::F16 => Tensor::F16(narrow(x)),
            _ => Tensor::Bf16(narrow(x)),
        }
    }

    fn wide(&self) -> Vec<f32> {
        of!(self, x => wide(x))
    }
}

fn narrow<T: Number>(x: &[f32]) -> Vec<T> {
    x.iter().map(|x| T::of(*x)).collect()
}

fn wide<T: Number>(x: &[T]) -> Vec<f32> {
    x.iter().map(|x| x.wide()).collect()
}

/// A case: shape, codec and options.
#[derive(Clone, Debug)]
struct Setup {
    shape: LayerShape,
    lanes: Lanes,
    codec: usize,
    rule: usize,
    read: ReadPages,
    seed: u64,
}

fn setup() -> impl Strategy<Value = Setup> {
    let dims = prop_oneof![Just((32, 32)), Just((64, 40)), Just((16, 128))];
    let dtype = || prop::sample::select(&Dtype::ALL[..]);
    let lanes: Vec<Lanes> = Lanes::available().collect();
    let read = prop_oneof![3 => Just(ReadPages::All), 1 => Just(ReadPages::Experts), 1 => Just(ReadPages::Quest { pages: 1 })];
    let of = (dims, dtype(), dtype(), 1..3u32, any::<bool>(), prop::sample::select(lanes));
    (of, 0..4usize, 0..4usize, read, any::<u64>()).prop_map(|(of, codec, rule, read, seed)| {
        let ((k_dim, v_dim), k, v, group, turned, lanes) = of;
        let shape = LayerShape::new(2, 2 * group, k_dim, k).values(v_dim, v);
        let shape = shape.rope(turned.then(|| Rope::new(100.0, 16)));
        Setup { shape, lanes, codec, rule, read, seed }
    })
}

impl Setup {
    fn cache(&self) -> Cache {
        let quest = matches!(self.read, ReadPages::Quest { .. });
        let config = CacheConfig::new(vec![self.shape], 1 << 26).ring(32).rollback(4).sinks(2);
        let config =
            config.experts(EXPERTS, 1).lanes(self.lanes).key_bounds(quest).hits(Hits::new().every(1));
        let budget = || Budget::Tokens(120);
        let config = match self.rule {
            0 => config,
            1 => config.evict(Eviction::new(H2o, budget()).batch(4)),
            2 => config.evict(Eviction::new(SnapKv::default(), budget()).batch(4)),
            _ => config.evict(Eviction::new(KeyNorm, budget()).batch(4)),
        };
        let coding = Coding::new;
        let config = match self.codec {
            0 => config,
            1 => config.compress(Codec::new(coding(Code::Int8), coding(Code::Int4))),
            2 => config.compress(Codec::new(coding(Code::F16), coding(Code::Int8))),
            _ => {
                let map = Map::identity_subset(self.shape.layout.k_dim, &[0, 3, 9, 14, 15, 2]).unwrap();
                config.compress(Codec::new(coding(Code::Int8).map(map), coding(Code::Int8)))
            }
        };
        // Bounds are taken by the host.
        Cache::new(if quest { config } else { config.backend(backend()) }).unwrap()
    }
}

/// The results of a layer for some rows.
type Got = (Tensor, Vec<f32>, Vec<PageMass>);

/// Rows of a step: keys, values, queries, logits.
type Input = [Tensor; 4];

/// Two sequences in a closed loop.
struct Run {
    of: ClosedLoop,
    sequences: [Sequence; 2],
    options: Attend,
    /// Whether a policy evicted a token.
    evicted: bool,
}

impl Run {
    fn new(setup: &Setup) -> Run {
        let cache = setup.cache();
        let sequences = [cache.sequence(), cache.sequence()];
        let router: Box<dyn Router> =
            Box::new(LoadBalanced::default().router(Shape::new(EXPERTS, 1)).unwrap());
        let of = ClosedLoop::new(cache, vec![router]).unwrap();
        Run { of, sequences, options: Attend::new(0.2).read(setup.read), evicted: false }
    }

    /// A step of `n` tokens of each sequence, with masses if they are wanted; the output in `dtype`, and the experts.
    fn step(
        &mut self,
        n: [u32; 2],
        [k, v, q, logits]: &Input,
        dtype: Dtype,
        masses: bool,
    ) -> (Got, Vec<u16>) {
        let shape = self.of.cache().config().layers[0];
        let rows = n.iter().sum::<u32>() as usize * shape.query_heads as usize;
        let mut out = Tensor::narrow(dtype, &vec![f32::NAN; rows * shape.layout.v_dim as usize]);
        let (mut lse, mut mass) = (vec![0.0; rows], Vec::new());
        let mut step = self.of.begin(self.sequences.iter_mut().zip(n)).unwrap();
        let chosen = of!(logits, x => step.route(0, x)).unwrap().filing().experts.clone();
        of!(k, k => of!(v, v => step.append(0, k, v))).unwrap();
        of!(&mut out, out => {
            let to = AttendOutput::new(out).lse(&mut lse);
            let to = if masses { to.mass(&mut mass) } else { to };
            of!(q, q => step.attend(0, q, &self.options, to))
        })
        .unwrap();
        step.commit().unwrap();
        self.evicted |= !self.of.report().evicted.is_empty();
        ((out, lse, mass), chosen)
    }

    /// The last row of each sequence, attended again outside a step, in `dtype`.
    fn again(&self, q: &Tensor, dtype: Dtype) -> Tensor {
        let shape = self.of.cache().config().layers[0];
        let values = 2 * (shape.query_heads * shape.layout.v_dim) as usize;
        let mut out = Tensor::narrow(dtype, &vec![f32::NAN; values]);
        let row = |of| Rows::new(of, Position(of.next_position().0 - 1), 1);
        let rows = self.sequences.each_ref().map(row);
        let options = Attend::new(0.2);
        let attended = of!(&mut out, out => {
            of!(q, q => self.of.cache().attend(0, &rows, q, &options, AttendOutput::new(out)))
        });
        attended.unwrap();
        out
    }

    fn held(&self) -> Vec<Vec<pikv::report::PageInfo>> {
        let heads = self.sequences.iter().flat_map(|of| [0, 1].map(|head| of.pages(0, head).unwrap()));
        heads.map(Iterator::collect).collect()
    }
}

/// A history with keys, values, queries and outputs of these dtypes, beside one with the same values in f32.
fn same(setup: &Setup, [k_in, v_in, q_in, out_in]: [Dtype; 4]) {
    let (mut ours, mut wide_run) = (Run::new(setup), Run::new(setup));
    let LayerShape { kv_heads, query_heads, layout, .. } = setup.shape;
    let rounded = |x: &Tensor| bits(&Tensor::narrow(out_in, &x.wide()).wide());
    let mut rng = Rng(setup.seed);
    for i in 0..24 {
        let n = if i % 6 == 0 { [27, 9] } else { [1 + rng.below(4), 1] };
        let rows = n.iter().sum::<u32>();
        let mut values = |width: u32, scale| rng.values((rows * width) as usize, scale);
        let input = [
            Tensor::narrow(k_in, &values(kv_heads * layout.k_dim, 2.0)),
            Tensor::narrow(v_in, &values(kv_heads * layout.v_dim, 1.0)),
            Tensor::narrow(q_in, &values(query_heads * layout.k_dim, 3.0)),
            Tensor::narrow(q_in, &values(EXPERTS, 1.0)),
        ];
        let in_f32 = input.each_ref().map(|x| Tensor::F32(x.wide()));
        let q = input[2].wide();
        let last = &q[q.len() - 2 * (query_heads * layout.k_dim) as usize..];
        let masses = rng.one_in(3);
        let ((out, lse, mass), chosen) = ours.step(n, &input, out_in, masses);
        let ((want, want_lse, want_mass), want_chosen) = wide_run.step(n, &in_f32, Dtype::F32, masses);
        assert_eq!(bits(&out.wide()), rounded(&want), "out of step {i}");
        assert_eq!((bits(&lse), chosen), (bits(&want_lse), want_chosen), "step {i}");
        assert_eq!(mass, want_mass, "step {i}");
        let again = ours.again(&Tensor::narrow(q_in, last), out_in);
        let want = wide_run.again(&Tensor::F32(last.to_vec()), Dtype::F32);
        assert_eq!(bits(&again.wide()), rounded(&want), "outside step {i}");
    }
    assert_eq!(ours.held(), wide_run.held());
    assert_eq!(ours.evicted, setup.rule > 0, "policies had something to do");
}

proptest! {
    #![proptest_config(cases(48, 2000))]
    #[test]
    fn tensors_in_16_bits_have_the_bits_of_their_values_in_f32(
        setup in setup(),
        of in prop::array::uniform4(prop::sample::select(&Dtype::ALL[..])),
    ) {
        same(&setup, of);
    }
}

fn small(stored: Dtype) -> Cache {
    let layer = LayerShape::new(1, 2, 4, stored).values(3, stored);
    Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(4).experts(2, 1).backend(backend())).unwrap()
}

/// A step of one row that is committed if all its calls succeed.
fn row<T: Number>(step: &mut Step<'_>, at: [Option<(usize, f32)>; 3], out: &mut [T]) -> Result<(), Error> {
    let [k, v, q] = [(4, 0), (3, 1), (8, 2)].map(|(n, which)| {
        let mut x = vec![T::ONE; n];
        if let Some((channel, value)) = at[which as usize] {
            x[channel] = T::of(value);
        }
        x
    });
    step.append(0, &k, &v)?;
    step.attend(0, &q, &Attend::new(0.5), AttendOutput::new(out))
}

fn refused<T: Number>(value: f32) {
    let cache = small(Dtype::F32);
    for (which, name) in ["k", "v", "q"].into_iter().enumerate() {
        let mut sequence = cache.sequence();
        let mut at = [None; 3];
        at[which] = Some((2, value));
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        match row::<T>(&mut step, at, &mut [T::ONE; 6]).unwrap_err() {
            Error::Unstorable { what, channel: 2, value: named, row: 0, .. } if which < 2 => {
                assert!(what == name && named.to_bits() == T::of(value).wide().to_bits());
                // The layer may be appended again.
                let mut out = [T::of(0.0); 6];
                row::<T>(&mut step, [None; 3], &mut out).unwrap();
                assert_eq!(wide(&out), [1.0; 6]);
            }
            Error::Query { layer: 0, row: 0, head: 0, channel: 2, value: named } if which == 2 => {
                assert_eq!(named.to_bits(), T::of(value).wide().to_bits());
            }
            e => panic!("{name}: {e}"),
        }
    }
}

#[test]
fn what_is_not_finite_is_refused_in_every_dtype() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        refused::<f32>(value);
        refused::<f16>(value);
        refused::<bf16>(value);
    }
    // bf16 has values that f16 pages do not.
    let cache = small(Dtype::F16);
    let mut sequence = cache.sequence();
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    let done = row::<bf16>(&mut step, [None, Some((1, 1e6)), None], &mut [bf16::ONE; 6]);
    assert!(matches!(done, Err(Error::Unstorable { what: "v", channel: 1, dtype: "f16", .. })), "{done:?}");
}

#[test]
fn results_that_the_dtype_does_not_hold_are_named() {
    let cache = small(Dtype::F32);
    for (value, fits) in [(65_519.996f32, true), (65_520.0, false), (-131_072.0, false)] {
        let mut sequence = cache.sequence();
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        step.append(0, &[1.0; 4], &[0.5, value, value]).unwrap();
        let mut out = [f16::ONE; 6];
        let done = step.attend(0, &[1.0; 8], &Attend::new(0.5), AttendOutput::new(&mut out));
        let named = Error::Output { layer: 0, row: 0, head: 0, channel: 1, value, dtype: "f16" };
        assert_eq!(done, if fits { Ok(()) } else { Err(named) });
        assert_eq!(out, [0.5, value, value, 0.5, value, value].map(f16::from_f32));
        // In a dtype that holds them it is as if nothing had been asked.
        let mut out = [bf16::ONE; 6];
        step.attend(0, &[1.0; 8], &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
        assert_eq!(out[1], bf16::from_f32(value));
        step.route(0, &[0]).unwrap();
        step.commit().unwrap();
    }
    let mut sequence = cache.sequence();
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    step.append(0, &[f16::ONE; 4], &[bf16::MAX; 3]).unwrap();
    let done = step.attend(0, &[f16::ONE; 8], &Attend::new(1e7), AttendOutput::new(&mut [f16::ONE; 6]));
    assert!(matches!(done, Err(Error::ScoreOverflow { .. })), "scores come first: {done:?}");
    let done = step.attend(0, &[f16::ONE; 7], &Attend::new(1.0), AttendOutput::new(&mut [f16::ONE; 6]));
    assert!(matches!(done, Err(Error::Length { what: "q", got: 7, expected: 8, .. })), "{done:?}");
    let done = step.attend(0, &[f16::ONE; 8], &Attend::new(1.0), AttendOutput::new(&mut [f16::ONE; 5]));
    assert!(matches!(done, Err(Error::Length { what: "out", got: 5, expected: 6, .. })), "{done:?}");
}
