//! Sinks of layers with a policy that sets them.

use crate::setup::{Kind, Row, held, row, run, shape};
use pikv::policy::{Budget, Duo, Eviction, H2o, StreamingLlm};
use pikv::report::Place;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ReadPages, Sequence};

fn base() -> CacheConfig {
    let layers = vec![shape(2, 2, 4, 3), shape(2, 2, 4, 3).window(12), shape(1, 2, 4, 3)];
    CacheConfig::new(layers, 4 << 20).ring(4).experts(4, 2).backend(pikv_test::backend::backend())
}

fn feed(cache: &Cache, sequence: &mut Sequence, ids: std::ops::Range<u64>, read: ReadPages) {
    for id in ids {
        let rows: [Row; 1] = [row(cache.config(), Kind::Noise, id)];
        run(cache, sequence, &rows, |step, l, q, size| {
            let mut out = vec![0.0; size];
            step.attend(l, q, &Attend::new(0.5).read(read), AttendOutput::new(&mut out)).unwrap();
        });
    }
}

/// Positions of each layer's first head in the sinks' own pages.
fn sinks(sequence: &Sequence, layers: usize) -> Vec<Vec<u32>> {
    let of = |l| {
        let pages = sequence.pages(l, 0).unwrap().filter(|page| page.id.place == Place::Sinks);
        pages
            .flat_map(|page| sequence.positions(l, 0, page.id).unwrap().map(|(_, p)| p.0).collect::<Vec<_>>())
            .collect()
    };
    (0..layers).map(of).collect()
}

#[test]
fn streaming_llm_keeps_four_sinks_where_none_are_named() {
    let sl = || Eviction::new(StreamingLlm, Budget::Tokens(20)).batch(1);
    let rules = |config: CacheConfig| {
        let h2o = Eviction::new(H2o, Budget::Tokens(20)).batch(1);
        config.evict_layer(0, sl()).evict_layer(1, sl()).evict_layer(2, h2o)
    };
    let first = |n: u32| (0..n).collect::<Vec<u32>>();
    for (named, want) in [(None, [4, 4, 0]), (Some(0), [0, 0, 0]), (Some(2), [2, 2, 2]), (Some(7), [7, 7, 7])]
    {
        let mut config = rules(base());
        config.sinks = named;
        let cache = Cache::new(config).unwrap();
        assert_eq!([0, 1, 2].map(|l| cache.store(l).unwrap().sinks), want);
        assert!(cache.store(3).is_err());
        let mut sequence = cache.sequence();
        feed(&cache, &mut sequence, 0..70, ReadPages::All);
        assert_eq!(sinks(&sequence, 3), want.map(first), "{named:?}");
        // The newest tokens fill the rest of the 20 besides the sinks; a window shows 12 tokens and the sinks.
        for head in 0..2 {
            let tokens: Vec<u32> = held(&sequence, 0, head).into_iter().collect();
            assert_eq!(tokens, [first(want[0]), (50 + want[0]..70).collect()].concat(), "{named:?}");
            let windowed = held(&sequence, 1, head);
            assert!((0..want[1]).chain(58..70).all(|p| windowed.contains(&p)), "{named:?} {windowed:?}");
        }
        // Bytes are those that the planner's rules give, layer by layer.
        let bytes: u64 = (0..3).map(|l| cache.bytes_at_most(l, 70).unwrap()).sum();
        assert!(sequence.bytes() <= bytes);
        // A fork has them too.
        let fork = sequence.fork();
        assert_eq!(sinks(&fork, 3), want.map(first));
    }
    // By the same rule where no policy is given, one that is not StreamingLLM, or one of heads that stream.
    let of = |config: CacheConfig| Cache::new(config).unwrap().store(0).unwrap().sinks;
    assert_eq!(of(base()), 0);
    assert_eq!(of(base().evict(Eviction::new(H2o, Budget::Tokens(20)))), 0);
    let gates = vec![vec![1.0, 0.0], vec![1.0, 0.0], vec![0.0]];
    assert_eq!(of(base().evict(Duo::new(gates, 16).eviction())), 4);
}

#[test]
fn the_sinks_of_a_layer_are_read_whatever_the_experts() {
    // Keys of 0: the log-sum-exp is the logarithm of the tokens that a row reads.
    let config = base().evict_layer(0, Eviction::new(StreamingLlm, Budget::Tokens(40)).batch(1));
    let cache = Cache::new(config).unwrap();
    let mut sequence = cache.sequence();
    for id in 0..60u64 {
        let rows = [row(cache.config(), Kind::Equal, id)];
        let experts = rows[0].experts[0].clone();
        let mut read = 0.0;
        run(&cache, &mut sequence, &rows, |step, l, q, size| {
            let (mut out, mut lse) = (vec![0.0; size], vec![0.0; q.len() / 4]);
            let how = Attend::new(0.5).read(ReadPages::Experts);
            step.attend(l, q, &how, AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
            if l == 0 {
                read = lse[0].exp().round();
            }
        });
        if id < 59 {
            continue;
        }
        // Sinks, ring, and the held tokens of the row's experts.
        let own = sequence.pages(0, 0).unwrap().filter(|page| match page.id.place {
            Place::Run(e) => experts.contains(&e),
            _ => false,
        });
        let own: u32 = own.map(|page| page.tokens).sum();
        // One token was filed, and perhaps one evicted, after the row was read.
        assert!((read as i64 - i64::from(4 + 4 + own)).abs() <= 1, "{read} read, {own} of its experts");
        assert!(own < 32, "all experts were read");
    }
}
