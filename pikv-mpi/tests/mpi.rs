//! Ranks in processes, started by `mpiexec`: the bits of one process, and the behaviour of the others when one is killed or stopped.
//!
//! Each test starts this binary again under `mpiexec`, where the ignored test `rank` is every rank. The launcher starts each rank from a
//! shell that outlives it, so that it does not kill the other ranks when one dies. UCX, which Debian's MPICH uses, is limited to transports
//! that do not abort them. `PIKV_LIBCUDA` names the stand-in for the CUDA driver, which has a device for each rank
//! (`target/debug/deps/libpikv_standin.so` of the workspace).

use pikv::fabric::{FabricError, Options, RankPlan, Schedule};
use pikv::report::PageMass;
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Backend, Cache, CacheConfig, Dtype, Error, LayerShape, Position, ReadPages, Rows,
    Sequence,
};
use pikv_mpi::Mpi;
use pikv_test::numbers::{bits, noise};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(3);
/// Extra time for a machine with fewer cores than ranks.
const SLACK: Duration = Duration::from_secs(12);
const BUDGET: u64 = 256 << 20;
/// Timeout of a case: with a device each, three ranks interpret kernels on the cores of one machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Two layers of 2 KV heads of 4 query heads, 64 channels of bf16, 8 experts.
fn config(ranks: u32) -> CacheConfig {
    let layer = LayerShape::new(2, 8, 64, Dtype::Bf16);
    let config = CacheConfig::new(vec![layer; 2], BUDGET).ring(64).sinks(4).rollback(8).experts(8, 2);
    config.shards(ShardMap::sum(ranks).unwrap())
}

struct Run<'a> {
    cache: &'a Cache,
    seed: u64,
    outs: Vec<Vec<u32>>,
}

impl Run<'_> {
    /// A step of `n` tokens, every layer attended.
    fn step(&mut self, sequence: &mut Sequence, n: u32, read: ReadPages) -> Result<(), Error> {
        let rows = n as usize;
        let mut step = self.cache.begin([(&mut *sequence, n)])?;
        for layer in 0..2 {
            self.seed += 10;
            let experts: Vec<u16> = noise(self.seed, rows)
                .iter()
                .flat_map(|x| {
                    let first = ((x + 1.0) * 4.0) as u16 % 8;
                    [first, (first + 3) % 8]
                })
                .collect();
            step.append(layer, &noise(self.seed + 1, rows * 128), &noise(self.seed + 2, rows * 128))?;
            step.route(layer, &experts)?;
            let (mut out, mut lse) = (vec![0.0; rows * 512], vec![0.0; rows * 8]);
            let q: Vec<f32> = noise(self.seed + 3, rows * 512).iter().map(|x| 3.0 * x).collect();
            let attend = Attend::new(0.125).read(read);
            step.attend(layer, &q, &attend, AttendOutput::new(&mut out).lse(&mut lse))?;
            self.outs.push(bits(&out));
            self.outs.push(bits(&lse));
        }
        step.commit()
    }
}

/// Adds 64 tokens without attention.
fn fill(cache: &Cache, sequence: &mut Sequence) -> Result<(), Error> {
    let mut step = cache.begin([(&mut *sequence, 64)])?;
    for layer in 0..2 {
        step.append(layer, &noise(1, 64 * 128), &noise(2, 64 * 128))?;
        step.route(layer, &(0..64).flat_map(|t| [t % 8, (t + 1) % 8]).collect::<Vec<u16>>())?;
    }
    step.commit()
}

/// Prefill in chunks, decode, rollback, fork, masses: every output on the way.
fn history(cache: &Cache) -> Vec<Vec<u32>> {
    let mut run = Run { cache, seed: 0, outs: Vec::new() };
    let mut sequence = cache.sequence();
    for chunk in [48, 64, 17, 33, 64, 64, 64, 64, 64, 64, 64, 64, 50] {
        run.step(&mut sequence, chunk, ReadPages::All).unwrap();
    }
    for t in 0..40 {
        run.step(&mut sequence, 1, if t % 2 == 0 { ReadPages::All } else { ReadPages::Experts }).unwrap();
        if t % 10 == 9 {
            sequence.rollback(7).unwrap();
        }
    }
    let mut fork = sequence.fork();
    for _ in 0..12 {
        run.step(&mut sequence, 5, ReadPages::All).unwrap();
        run.step(&mut fork, 3, ReadPages::All).unwrap();
    }
    let rows = [Rows::new(&fork, Position(fork.next_position().0 - 2), 2)];
    let (mut out, mut mass) = (vec![0.0; 2 * 512], Vec::<PageMass>::new());
    cache
        .attend(
            1,
            &rows,
            &noise(7, 2 * 512),
            &Attend::new(0.125),
            AttendOutput::new(&mut out).mass(&mut mass),
        )
        .unwrap();
    run.outs.push(bits(&out));
    run.outs.extend(mass.iter().map(|page| bits(&page.tokens)));
    run.outs
}

fn same_bits(cache: &Cache, ranks: u32) {
    let plain = Cache::new(config(ranks)).unwrap();
    assert!(history(&plain) == history(cache), "other bits than in one process");
    assert_eq!(cache.usage().taken, 0);
    assert!(cache.ranks().unwrap().iter().all(|rank| rank.bytes == 0));

    // A decode step over 9,000 tokens, and its schedule.
    let mut run = Run { cache, seed: 1000, outs: Vec::new() };
    let mut sequence = cache.sequence();
    for _ in 0..140 {
        run.step(&mut sequence, 64, ReadPages::All).unwrap();
    }
    let filed = |sequence: &Sequence| {
        let mut filed = [0; 8];
        for page in sequence.pages(0, 0).unwrap() {
            if let pikv::report::Place::Run(e) = page.id.place {
                filed[usize::from(e)] += page.tokens;
            }
        }
        filed
    };
    run.step(&mut sequence, 1, ReadPages::All).unwrap();
    let from = cache.traffic().unwrap();
    let steps = 64;
    for _ in 0..steps {
        run.step(&mut sequence, 1, ReadPages::All).unwrap();
    }
    let to = cache.traffic().unwrap();
    let measured = (to.sent + to.received - from.sent - from.received) as f64 / f64::from(steps);
    let config = config(ranks);
    let of = |t: u32, e: u16, h: u32| config.shards.shard(u64::from(t), u32::from(e), h);
    let schedule = Schedule::new(&config, ranks, &filed(&sequence), of).unwrap();
    // Rank 0 is the front itself.
    let bytes = |plan: &RankPlan| plan.exact.sent + plan.exact.received;
    let said: f64 = schedule.ranks[1..].iter().map(bytes).sum();
    println!("{ranks} ranks: {measured:.0} bytes a decode step on the wire, {said:.0} by the formula");
    drop(sequence);
    assert!(cache.ranks().unwrap().iter().all(|rank| rank.bytes == 0));
    assert!(ranks == 1 && measured == 0.0 || (measured / said - 1.0).abs() < 0.05, "{measured} {said}");
}

/// [`same_bits`] with little attention, for ranks on interpreted devices.
fn on_devices(cache: &Cache, ranks: u32) {
    let few = |cache: &Cache| {
        let mut run = Run { cache, seed: 0, outs: Vec::new() };
        let mut sequence = cache.sequence();
        (0..12).for_each(|_| fill(cache, &mut sequence).unwrap());
        for n in [1, 3, 1] {
            run.step(&mut sequence, n, ReadPages::All).unwrap();
        }
        (run.outs, sequence)
    };
    let (want, _) = few(&Cache::new(config(ranks)).unwrap());
    let (got, sequence) = few(cache);
    assert!(want == got, "other bits than in one process");
    assert!(cache.ranks().unwrap().iter().all(|rank| rank.pages > 0));
    drop(sequence);
    assert!(cache.ranks().unwrap().iter().all(|rank| rank.bytes == 0));
}

/// Sends a signal to a rank, by the process id that it wrote.
fn signal(dir: &Path, rank: u32, signal: &str) {
    let pid = std::fs::read_to_string(dir.join(rank.to_string())).unwrap();
    assert!(Command::new("kill").args([signal, pid.trim()]).status().unwrap().success());
}

/// Kills or stops rank 2 while others write or read.
fn failure(cache: &Cache, dir: &Path, how: &str, append: bool) {
    let mut run = Run { cache, seed: 0, outs: Vec::new() };
    let mut sequence = cache.sequence();
    for _ in 0..60 {
        run.step(&mut sequence, 64, ReadPages::All).unwrap();
    }
    // A sequence that is not on the rank: in its ring only.
    let mut short = cache.sequence();
    run.step(&mut short, 20, ReadPages::All).unwrap();
    let seen = |sequence: &Sequence| {
        let mut out = vec![0.0; 512];
        let rows = [Rows::new(sequence, Position(sequence.next_position().0 - 1), 1)];
        let read = cache.attend(0, &rows, &noise(5, 512), &Attend::new(0.125), AttendOutput::new(&mut out));
        read.map(|()| bits(&out))
    };
    let before = seen(&short).unwrap();
    let (struck, mut last) = (AtomicBool::new(false), Instant::now());
    let failed = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            signal(dir, 2, how);
            struck.store(true, Ordering::Relaxed);
        });
        let begun = Instant::now();
        loop {
            let done = if append {
                // Only tokens for the ranks.
                fill(cache, &mut sequence)
            } else {
                seen(&sequence).map(|_| ())
            };
            match done {
                Ok(()) => last = Instant::now(),
                Err(error) => return error,
            }
            assert!(begun.elapsed() < SLACK, "nobody noticed");
        }
    });
    let waited = last.elapsed();
    assert!(struck.load(Ordering::Relaxed) && waited < TIMEOUT + SLACK, "{waited:?}");
    assert!(matches!(failed, Error::Fabric(FabricError::Lost { rank: 2, .. })), "{failed:?}");
    println!("signal {how}, append {append}: {failed}; after {waited:?}");
    // Sequences of other ranks stay usable and unchanged.
    assert_eq!(seen(&short).unwrap(), before);
    assert!(matches!(seen(&sequence), Err(Error::Fabric(FabricError::Lost { rank: 2, .. }))));
    // New sequences lie on the three that are left, with the bits of one process.
    let plain = Cache::new(config(4)).unwrap();
    assert!(history(&plain) == history(cache), "other bits on three ranks");
    let mut fresh = cache.sequence();
    for _ in 0..40 {
        run.step(&mut fresh, 64, ReadPages::All).unwrap();
    }
    let ranks = cache.ranks().unwrap();
    assert!(ranks[2].lost.is_some() && [0, 1, 3].iter().all(|rank| ranks[*rank].pages > 0), "{ranks:?}");
    drop((sequence, short, fresh));
    let ranks = cache.ranks().unwrap();
    assert!(ranks.iter().all(|rank| rank.bytes == 0), "{ranks:?}");
}

/// Every rank of a run, started by `mpiexec`.
#[test]
#[ignore = "a rank of a world that the other tests start"]
fn rank() {
    let (Ok(dir), Ok(case)) = (std::env::var("PIKV_RANKS"), std::env::var("PIKV_CASE")) else { return };
    let dir = PathBuf::from(dir);
    let mpi = Mpi::init().unwrap();
    let (rank, ranks) = (mpi.rank(), mpi.ranks());
    std::fs::write(dir.join(rank.to_string()), std::process::id().to_string()).unwrap();
    let config = config(ranks);
    let backend = match case.as_str() {
        "devices" => Backend::cuda_device(rank).unwrap(),
        _ => Backend::CPU,
    };
    let kept = config.clone().backend(backend);
    if rank == 0 {
        let fabric = mpi.front(&kept, BUDGET).unwrap();
        let cache = Cache::over(config, fabric, Options::default().timeout(TIMEOUT)).unwrap();
        match case.as_str() {
            "bits" => same_bits(&cache, ranks),
            "devices" => on_devices(&cache, ranks),
            "front" => std::process::abort(),
            other => {
                let (how, what) = other.split_once(' ').unwrap();
                failure(&cache, &dir, how, what == "append");
            }
        }
        std::fs::write(dir.join("done"), "").unwrap();
        return;
    }
    let served = mpi.serve(&kept, BUDGET, TIMEOUT);
    match case.as_str() {
        "front" => {
            let lost = matches!(served, Err(Error::Fabric(FabricError::Lost { rank: 0, .. })));
            assert!(lost, "{served:?}");
        }
        // The one that was stopped wakes up when all is over.
        _ if rank == 2 && case.starts_with("-STOP") => {}
        _ => {
            let store = served.unwrap();
            store.check().unwrap();
            assert_eq!(store.bytes(), 0);
        }
    }
    drop(mpi);
    std::fs::write(dir.join(format!("served-{rank}")), "").unwrap();
}

/// Stays until all is over.
const SHELL: &str = r#""$0" "$@"; until [ -e "$PIKV_RANKS/end" ]; do sleep 0.1; done"#;

/// Runs a case on so many ranks; all except those in `gone` must finish.
fn world(ranks: u32, case: &str, gone: &[u32]) {
    let dir = std::env::temp_dir().join(format!(
        "pikv-mpi-{}-{ranks}-{}",
        std::process::id(),
        case.replace(' ', "")
    ));
    std::fs::create_dir_all(&dir).unwrap();
    let mut launcher = Command::new("mpiexec");
    let me = std::env::current_exe().unwrap();
    launcher
        .args(["-n", &ranks.to_string(), "sh", "-c", SHELL])
        .arg(&me)
        .envs([("UCX_TLS", "posix,self"), ("UCX_ERROR_SIGNALS", ""), ("UCX_HANDLE_ERRORS", "none")])
        .args(["--exact", "rank", "--ignored", "--nocapture", "--test-threads=1"])
        .env("PIKV_RANKS", &dir)
        .env("PIKV_CASE", case)
        .env("PIKV_STANDIN_DEVICES", ranks.to_string())
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = launcher.spawn().expect("mpiexec of MPICH");
    let begun = Instant::now();
    let names: Vec<String> = (0..ranks)
        .filter(|rank| !gone.contains(rank))
        .map(|rank| if rank == 0 { "done".to_owned() } else { format!("served-{rank}") })
        .collect();
    let there = || names.iter().all(|name| dir.join(name).exists());
    while !there() && begun.elapsed() < PATIENCE && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let missing: Vec<&String> = names.iter().filter(|name| !dir.join(name).exists()).collect();
    let took = begun.elapsed();
    std::fs::write(dir.join("end"), "").unwrap();
    // A stopped rank, and those that wait for it, are killed.
    for rank in gone.iter().copied().chain(if missing.is_empty() { 0..0 } else { 0..ranks }) {
        if let Ok(pid) = std::fs::read_to_string(dir.join(rank.to_string())) {
            let _ = Command::new("kill").args(["-9", pid.trim()]).stderr(Stdio::null()).status();
        }
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        missing.is_empty(),
        "{missing:?} after {took:?}: {said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let told = said.lines().filter_map(|line| line.rsplit("test rank ... ").next());
    told.filter(|line| line.contains(" rank") && line.contains(": ")).for_each(|line| println!("{line}"));
    std::fs::remove_dir_all(&dir).unwrap();
}

/// One world at a time: they take turns at the machine's cores.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn turn() -> std::sync::MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn ranks_return_the_bits_of_one_process() {
    let _turn = turn();
    for ranks in 1..=4 {
        world(ranks, "bits", &[]);
    }
}

/// Each process keeps its pages on a device of its own, over the stand-in for the driver.
#[test]
fn processes_with_a_device_each() {
    let _turn = turn();
    world(3, "devices", &[]);
}

#[test]
fn one_of_four_is_killed() {
    let _turn = turn();
    world(4, "-9 append", &[2]);
    world(4, "-9 attend", &[2]);
}

#[test]
fn one_of_four_is_stopped() {
    let _turn = turn();
    world(4, "-STOP attend", &[2]);
}

#[test]
fn the_front_dies() {
    let _turn = turn();
    world(3, "front", &[0]);
}
