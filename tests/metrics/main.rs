//! Sinks of the cache's metrics, and reports.

mod log;
mod map;
mod spans;
mod text;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use pikv::fabric::Traffic;
use pikv::metrics::{
    Collector, Evicted, Histogram, MetricsSink, PrefixUsage, Reused, Sink, StepMetrics, TracingSink,
};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tracing::Level;
use tracing_subscriber::fmt::format::FmtSpan;

/// A cache and an empty sequence of it.
fn cache_of(config: pikv::CacheConfig) -> (pikv::Cache, pikv::Sequence) {
    let cache = pikv::Cache::new(config).unwrap();
    let sequence = cache.sequence();
    (cache, sequence)
}

/// Reports a short run to a sink.
fn play(sink: &dyn Sink) {
    let step = StepMetrics::default().rows(4).resident_bytes(900).logical_bytes(1000);
    sink.step(&step.hits(&[5.0, 0.0, 1.5]).misses(&[0.0, 2.0, 1.0]));
    sink.evicted(&Evicted::default().layer(1).kv_head(2).tokens(32).bytes(640).age(70));
    sink.evicted(&Evicted::default().tokens(9).bytes(160).age(3));
    sink.reused(&Reused::default().kv_head(1).gap(6));
    let step = StepMetrics::default().rows(1).resident_bytes(100).logical_bytes(1250);
    sink.step(&step.hits(&[1.0, 1.0, 1.0]).misses(&[]).held_tokens(30).lost_tokens(10));
    let traffic = Traffic::default().sent(700).received(900).messages(3);
    sink.traffic(&traffic);
    // Sums: the later holds.
    sink.traffic(&traffic.sent(1700).rounds(2).moved(8).replicated(16));
}

#[test]
fn a_collector_adds_up() {
    let sink = Collector::new(3);
    play(&sink);
    let totals = sink.totals();
    assert_eq!((totals.steps, totals.rows), (2, 5));
    assert_eq!((totals.traffic.sent, totals.traffic.received, totals.traffic.moved), (1700, 900, 8));
    assert_eq!((totals.resident_bytes, totals.peak_resident_bytes, totals.logical_bytes), (100, 900, 1250));
    assert_eq!((&totals.hits[..], &totals.misses[..]), (&[6.0, 1.0, 2.5][..], &[0.0, 2.0, 1.0][..]));
    assert_eq!((totals.residency(), totals.hit_rate_of_all()), (Some(0.75), Some(9.5 / 12.5)));
    assert_eq!((totals.evicted_pages, totals.evicted_tokens, totals.evicted_bytes), (2, 41, 800));
    assert_eq!((totals.age.min(), totals.age.max(), totals.age.count()), (Some(3), Some(70), 2));
    assert_eq!((totals.gap.min(), totals.gap.count()), (Some(6), 1));
    let rates = [Some(1.0), Some(1.0 / 3.0), Some(2.5 / 3.5), None];
    assert_eq!([0, 1, 2, 3].map(|expert| totals.hit_rate(expert)), rates);
    assert_eq!(sink.take(), totals);
    let fresh = sink.totals();
    assert_eq!((fresh.steps, fresh.peak_resident_bytes, &fresh.hits[..]), (0, 100, &[0.0, 0.0, 0.0][..]));
    assert_eq!(fresh.hit_rate(0), None);
}

/// Experts beyond the number that a collector was made for take no memory.
#[test]
fn a_collector_is_bounded() {
    let sink = Collector::new(1);
    for _ in 0..1000 {
        play(&sink);
    }
    let totals = sink.totals();
    assert_eq!((&totals.hits[..], &totals.misses[..]), (&[6000.0][..], &[0.0][..]));
    assert_eq!(totals.age.buckets().count(), 2);
}

#[test]
fn a_collector_is_shared() {
    let sink = Arc::new(Collector::new(3));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..250).for_each(|_| play(&*sink)));
        }
    });
    assert_eq!((sink.totals().steps, sink.totals().evicted_pages), (2000, 2000));
}

/// A sink that ignores everything, and one that takes steps only.
#[test]
fn defaults_do_nothing() {
    struct Steps(Mutex<u32>);
    impl Sink for Steps {
        fn step(&self, _: &StepMetrics<'_>) {
            *self.0.lock().unwrap() += 1;
        }
    }
    play(&());
    let steps = Steps(Mutex::new(0));
    play(&steps);
    assert_eq!(*steps.0.lock().unwrap(), 2);
}

proptest! {
    /// Histograms, also merged ones, against the sorted values.
    #[test]
    fn histograms(values in prop::collection::vec((any::<u64>(), 0u32..64).prop_map(|(x, s)| x >> s), 0..60), cut in 0usize..60) {
        let of = |values: &[u64]| {
            let mut histogram = Histogram::default();
            values.iter().for_each(|x| histogram.record(*x));
            histogram
        };
        let all = of(&values);
        let (one, two) = values.split_at(cut.min(values.len()));
        let mut merged = of(one);
        merged.merge(&of(two));
        prop_assert_eq!(&merged, &all);

        let mut sorted = values.clone();
        sorted.sort_unstable();
        prop_assert_eq!(all.count(), sorted.len() as u64);
        prop_assert_eq!((all.min(), all.max()), (sorted.first().copied(), sorted.last().copied()));
        let sum: u128 = sorted.iter().map(|x| u128::from(*x)).sum();
        prop_assert_eq!(all.mean(), (!sorted.is_empty()).then(|| sum as f64 / sorted.len() as f64));
        let mut end = None;
        for (first, last, n) in all.buckets() {
            prop_assert!(end.is_none_or(|end| end < first) && first <= last);
            prop_assert!(last == 0 || last / 2 < first || first == 1);
            prop_assert_eq!(n, sorted.iter().filter(|x| (first..=last).contains(x)).count() as u64);
            end = Some(last);
        }
        for q in [0.0, 0.01, 0.25, 0.5, 0.9, 1.0] {
            let rank = ((q * sorted.len() as f64).ceil() as usize).max(1);
            let exact = sorted.get(rank - 1).copied();
            let found = all.quantile(q);
            prop_assert_eq!(found.is_some(), exact.is_some());
            if let (Some(found), Some(exact)) = (found, exact) {
                prop_assert!(found >= exact && found / 2 <= exact, "{found} for {exact}");
            }
        }
    }
}

#[test]
fn histograms_of_the_ends() {
    let mut histogram = Histogram::default();
    assert_eq!((histogram.quantile(0.5), histogram.mean(), histogram.max()), (None, None, None));
    [0, u64::MAX, 1 << 63].iter().for_each(|x| histogram.record(*x));
    assert_eq!(histogram.buckets().collect::<Vec<_>>(), [(0, 0, 1), (1 << 63, u64::MAX, 2)]);
    assert_eq!((histogram.quantile(1.0), histogram.quantile(-0.1)), (Some(u64::MAX), None));
    assert_eq!((histogram.quantile(1.1), histogram.quantile(f64::NAN)), (None, None));
    assert!(size_of::<Histogram>() < 600);
}

#[test]
fn the_metrics_crate() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let sink = MetricsSink::new(2);
        play(&sink);
        let found = PrefixUsage::default().bytes(640).lookups(4).asked_tokens(500).hits(3).hit_tokens(352);
        sink.prefixes(&found.evictions(2).evicted_tokens(64).unequal(1));
    });
    let mut seen: HashMap<String, DebugValue> = HashMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let key = key.key();
        let labels: Vec<String> = key.labels().map(|l| format!("{}={}", l.key(), l.value())).collect();
        seen.insert([key.name(), &labels.join(",")].join(" "), value);
    }
    let counters = [
        ("pikv_steps_total ", 2),
        ("pikv_rows_total ", 5),
        ("pikv_hit_pages_total expert=0", 6),
        ("pikv_hit_pages_total expert=1", 1),
        ("pikv_missed_pages_total expert=0", 0),
        ("pikv_missed_pages_total expert=1", 2),
        ("pikv_held_tokens_total ", 30),
        ("pikv_lost_tokens_total ", 10),
        ("pikv_evicted_pages_total ", 2),
        ("pikv_evicted_tokens_total ", 41),
        ("pikv_evicted_bytes_total ", 800),
        ("pikv_wire_sent_bytes_total ", 1700),
        ("pikv_wire_received_bytes_total ", 900),
        ("pikv_wire_messages_total ", 3),
        ("pikv_moved_pages_total ", 8),
        ("pikv_replicated_pages_total ", 16),
        ("pikv_uncompacted_total ", 0),
        ("pikv_unwiped_pages_total ", 0),
        ("pikv_prefix_lookups_total ", 4),
        ("pikv_prefix_asked_tokens_total ", 500),
        ("pikv_prefix_hits_total ", 3),
        ("pikv_prefix_hit_tokens_total ", 352),
        ("pikv_prefix_evicted_tokens_total ", 64),
        ("pikv_prefix_unequal_total ", 1),
    ];
    for (name, n) in counters {
        assert_eq!(seen.remove(name), Some(DebugValue::Counter(n)), "{name}");
    }
    let gauge = |x: f64| Some(DebugValue::Gauge(x.into()));
    assert_eq!(seen.remove("pikv_resident_bytes "), gauge(100.0));
    assert_eq!(seen.remove("pikv_logical_bytes "), gauge(1250.0));
    assert_eq!(seen.remove("pikv_prefix_bytes "), gauge(640.0));
    let histogram = |x: &[f64]| Some(DebugValue::Histogram(x.iter().map(|x| (*x).into()).collect()));
    assert_eq!(seen.remove("pikv_eviction_age_tokens "), histogram(&[70.0, 3.0]));
    assert_eq!(seen.remove("pikv_reuse_gap_tokens "), histogram(&[6.0]));
    assert!(seen.is_empty(), "{seen:?}");
}

#[test]
fn the_tracing_crate() {
    let lines = log::logged(Level::TRACE, FmtSpan::NONE, || play(&TracingSink));
    let expected = [
        "DEBUG pikv: step rows=4 resident_bytes=900 logical_bytes=1000 hit_pages=6.5 missed_pages=3.0 held_tokens=0 lost_tokens=0",
        "TRACE pikv: evicted layer=1 kv_head=2 tokens=32 bytes=640 age=70",
        "TRACE pikv: evicted layer=0 kv_head=0 tokens=9 bytes=160 age=3",
        "TRACE pikv: reused layer=0 kv_head=1 gap=6",
        "DEBUG pikv: step rows=1 resident_bytes=100 logical_bytes=1250 hit_pages=3.0 missed_pages=0.0 held_tokens=30 lost_tokens=10",
        "DEBUG pikv: traffic sent=700 received=900 messages=3 rounds=0 moved=0 replicated=0",
        "DEBUG pikv: traffic sent=1700 received=900 messages=3 rounds=2 moved=8 replicated=16",
    ];
    assert_eq!(lines, expected);
}
