//! Reports as text.

use super::cache_of;
use pikv::fabric::Schedule;
use pikv::planner::flexgen::{Class, Machine, Tier};
use pikv::planner::{Load, Planner, Sample, StepTime, Work};
use pikv::rules::Hits;
use pikv::shard::ShardMap;
use pikv::{Attend, AttendOutput, CacheConfig, Dtype, LayerShape, StepReport};

/// Two layers of 2 KV heads, in pages of 32 * (16 + 16) * 2 + 128 = 2176 bytes.
fn config() -> CacheConfig {
    CacheConfig::new(vec![LayerShape::new(2, 4, 16, Dtype::Bf16); 2], 1 << 20).ring(32)
}

#[test]
fn usage_and_what_a_step_met() {
    let config = config().shards(ShardMap::sum(2).unwrap()).hits(Hits::new().pages(1).every(1));
    let (cache, mut sequence) = cache_of(config);
    let mut report = StepReport::default();
    for n in [96, 1] {
        let mut step = cache.begin([(&mut sequence, n)]).unwrap();
        let n = n as usize;
        for layer in 0..2 {
            step.append(layer, &vec![0.5; n * 32], &vec![0.5; n * 32]).unwrap();
            let mut out = vec![0.0; n * 64];
            step.attend(layer, &vec![0.5; n * 64], &Attend::new(0.25), AttendOutput::new(&mut out)).unwrap();
        }
        step.commit_with(&mut report).unwrap();
    }
    let text = "                    in use  at most  share
pages             42.5 KiB  1.0 MiB  4.2 %
  shard 0         21.2 KiB
  shard 1         21.2 KiB
extremes of keys   4.6 KiB";
    assert_eq!(cache.usage().to_string(), text);
    let text = "\
layer  hits  misses  hit rate  held tokens  lost  fetched
0       2.0     0.0   100.0 %          130     0      0 B
1       2.0     0.0   100.0 %          130     0      0 B
all     4.0     0.0   100.0 %          260     0      0 B
evicted: 0 tokens of 0 pages, 0 B given back; tokens as they came: 24.2 KiB";
    assert_eq!(report.to_string(), text);
}

#[test]
fn plans() {
    let forecast = Planner::new(config()).unwrap().forecast(&Load::new(96)).unwrap().to_string();
    println!("{forecast}");
    let text = "\
pages                            25.5 KiB
tokens resident of a sequence          96
a decode step: calls                    2
  reads                          25.5 KiB
  computes                     49.2 kflop";
    assert_eq!(forecast, text);

    let samples = [(1, 0, 0), (1, 1 << 30, 0), (1, 0, 1 << 30)].map(|(calls, bytes, flops)| {
        Sample::new(Work::new(calls, bytes, flops), 1e-6 + bytes as f64 * 1e-10 + flops as f64 * 1e-11)
    });
    let time = StepTime::fit(&samples).unwrap().to_string();
    println!("{time}");
    let text = "\
T0, a call                      1.0 us
beta, reading                10.0 GB/s
F, computing             100.0 Gflop/s
error, root mean square          0.0 %
error, largest                   0.0 %";
    assert_eq!(time, text);

    let tiers = vec![Tier::new("host", 1 << 20, 1e9, 1e9)];
    let placed = Machine::new(100_000, tiers).place(&[Class::new("pool", 200, 1000)]).unwrap();
    println!("{placed}");
    let said = "pages of class  first tier  tier 1\n0                      100     100\n\
                a step takes 100.0 us, at least 100.0 us; link 1 100.0 us up and 0 s down";
    assert_eq!(placed.to_string(), said);

    let schedule = Schedule::new(&config(), 2, &[320], |t, _, _| t % 2).unwrap().to_string();
    println!("{schedule}");
    assert!(schedule.starts_with("rank   pages"), "{schedule}");
    assert_eq!(schedule.lines().count(), 4);
}
