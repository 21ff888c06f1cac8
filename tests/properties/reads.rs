//! Sequences of one step whose rows read different pages: each has the bits, and leaves the state, of a step of its own.

use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, ReadPages, Sequence, StepReport,
};
use pikv_test::backend::backend;
use pikv_test::numbers::bits;
use pikv_test::twins::{self, Given, Model, Values};
use proptest::prelude::*;

/// The form of reading of a sequence's rows, `None` for the call's; and whether gaps are closed.
type How = (Option<u8>, Option<bool>);

fn read(of: u8) -> ReadPages {
    match of % 4 {
        0 => ReadPages::All,
        1 => ReadPages::Experts,
        n => ReadPages::Quest { pages: u32::from(n - 1) * u32::from(of / 4 % 4) },
    }
}

/// Outputs and log-sum-exps of each sequence and layer, and masses: page, and bits.
type Seen = Vec<(Vec<u32>, Vec<u32>, Vec<(String, Vec<u32>)>)>;

fn rows<T: Copy>(all: &[T], rows: usize, own: &std::ops::Range<usize>) -> Vec<T> {
    let width = all.len() / rows;
    all[own.start * width..own.end * width].to_vec()
}

/// A step of sequences; the rows of each are a range of the given ones.
fn step(
    (cache, model): (&Cache, &Model),
    sequences: Vec<(&mut Sequence, std::ops::Range<usize>)>,
    given: &[Given],
    call: &Attend,
    hows: &[How],
) -> (Vec<Seen>, StepReport) {
    let all: Vec<std::ops::Range<usize>> = sequences.iter().map(|(_, own)| own.clone()).collect();
    let total = given[0].k.len() / (model.kv_heads * model.k_dim) as usize;
    let mut step = cache.begin(sequences.into_iter().map(|(s, own)| (s, own.len() as u32))).unwrap();
    for (i, (of, closed)) in hows.iter().enumerate() {
        of.iter().for_each(|of| step.set_read(i, read(*of)).unwrap());
        closed.iter().for_each(|on| step.set_closed_gaps(i, *on).unwrap());
    }
    let mut seen: Vec<Seen> = all.iter().map(|_| Vec::new()).collect();
    let n = step.rows();
    for (layer, Given { k, v, q, routes }) in given.iter().enumerate() {
        let own = |of: &[f32]| all.iter().flat_map(|own| rows(of, total, own)).collect::<Vec<f32>>();
        let routes: Vec<u16> = all.iter().flat_map(|own| rows(routes, total, own)).collect();
        step.append(layer, &own(k), &own(v)).unwrap();
        if model.experts > 1 {
            step.route(layer, &routes).unwrap();
        }
        let (outs, lses) = model.outs(n);
        let (mut out, mut lse, mut mass) = (vec![0.0; outs], vec![0.0; lses], Vec::new());
        let to = AttendOutput::new(&mut out).lse(&mut lse).mass(&mut mass);
        step.attend(layer, &own(q), call, to).unwrap();
        let mut first = 0;
        for (i, own) in all.iter().enumerate() {
            let at = first..first + own.len();
            first = at.end;
            let masses = mass.iter().filter(|mass| mass.sequence == i);
            let masses = masses.map(|m| (format!("{} {}", m.kv_head, m.page), bits(&m.tokens)));
            seen[i].push((bits(&rows(&out, n, &at)), bits(&rows(&lse, n, &at)), masses.collect()));
        }
    }
    let mut report = StepReport::default();
    step.commit_with(&mut report).unwrap();
    (seen, report)
}

proptest! {
    #![proptest_config(pikv_test::cases(40, 2_000))]
    #[test]
    fn each_reads_as_if_it_were_alone(
        model in twins::model(1..=3),
        steps in proptest::collection::vec(
            (
                proptest::collection::vec(prop_oneof![2 => Just(1u32), 2 => 1u32..=12, 1 => 10u32..=90], 3),
                proptest::collection::vec((any::<Option<u8>>(), any::<Option<bool>>()), 3),
                any::<u8>(),
            ),
            1..=10,
        ),
    ) {
        let config = || model.config(model.page() << 20).backend(backend());
        let caches = [Cache::new(config()).unwrap(), Cache::new(config()).unwrap()];
        let mut pairs: Vec<[Sequence; 2]> = (0..3).map(|_| caches.each_ref().map(Cache::sequence)).collect();
        let mut values = Values::default();
        for (tokens, hows, of) in &steps {
            let hows: Vec<How> =
                hows.iter().map(|(of, closed)| (*of, closed.map(|on| on && model.rope))).collect();
            let call = Attend::new(0.5).read(read(*of)).closed_gaps(model.rope && of % 3 == 0);
            let ends = tokens.iter().scan(0, |sum, n| { *sum += *n as usize; Some(*sum) });
            let own: Vec<_> = ends.zip(tokens).map(|(end, n)| end - *n as usize..end).collect();
            let given = values.step(&model, own[2].end);
            let parts = pairs.iter_mut().map(|[a, _]| a).zip(own.clone()).collect();
            let (together, sums) = step((&caches[0], &model), parts, &given, &call, &hows);
            let mut hits = vec![vec![0.0; model.experts as usize]; model.layers];
            for (i, [_, b]) in pairs.iter_mut().enumerate() {
                let (alone, report) =
                    step((&caches[1], &model), vec![(b, own[i].clone())], &given, &call, &hows[i..=i]);
                prop_assert_eq!(&together[i], &alone[0], "sequence {}", i);
                for (layer, hits) in hits.iter_mut().enumerate() {
                    hits.iter_mut().zip(report.hits(layer)).for_each(|(sum, n)| *sum += n);
                }
            }
            for (layer, hits) in hits.iter().enumerate() {
                prop_assert_eq!(sums.hits(layer), &hits[..]);
            }
            pairs.iter().for_each(|pair| twins::check(&model, pair, |_| {}));
        }
    }
}

#[test]
fn what_cannot_be_read_is_refused() {
    let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).experts(2, 1).backend(backend())).unwrap();
    let (mut a, mut b) = (cache.sequence(), cache.sequence());
    let mut step = cache.begin([(&mut a, 2), (&mut b, 3)]).unwrap();
    assert_eq!(step.set_read(0, ReadPages::Quest { pages: 1 }), Err(Error::NoBounds));
    assert_eq!(step.set_read(2, ReadPages::All), Err(Error::NotInStep { sequence: 2, sequences: 2 }));
    assert_eq!(step.set_closed_gaps(7, true), Err(Error::NotInStep { sequence: 7, sequences: 2 }));
    step.append(0, &[1.0; 20], &[1.0; 20]).unwrap();
    // Rows of the second sequence need their experts, which were not set yet: the first of them is row 2 of the call.
    step.set_read(1, ReadPages::Experts).unwrap();
    let attend = |step: &mut pikv::Step<'_>| {
        step.attend(0, &[1.0; 20], &Attend::new(1.0), AttendOutput::new(&mut [0.0; 20]))
    };
    assert_eq!(attend(&mut step), Err(Error::NotRouted { layer: 0, row: 2 }));
    step.set_read(1, ReadPages::All).unwrap();
    step.set_closed_gaps(1, true).unwrap();
    assert_eq!(attend(&mut step), Err(Error::NoRotation { layer: 0 }));
    step.leave_out(1).unwrap();
    assert_eq!(attend(&mut step), Ok(()));
}
