//! Shards on several ranks: the MoE of this repository generates text over them, and tables show bytes held and sent.
//!
//! `cargo run --release -p pikv-examples --bin distributed [-- --ranks 8] [--tokens 128] [--stream 131072]` runs one thread for each rank.
//! `mpiexec -n 4 target/release/examples/distributed`, built with `--features mpi`, runs one process for each. `--backend cuda` puts a rank
//! on every CUDA device of this host (built with the feature `cuda`, as examples are in this workspace).
//!
//! First, the text is generated in one process and over the ranks; the program fails if a bit of a logit differs. Then it prints a table of
//! the ranks. Then it fills layers of 32 query heads over 8 KV heads of 128 channels in bf16 with `--stream` tokens. Their experts are
//! drawn evenly, are those of the MoE on a novel, or are mostly one expert; pages are placed by the paper's map, by two others, and by
//! EPLB. Bytes are counted by the allocators. `--stream 0` skips this part.

use pikv::fabric::{Fabric, InProcess, Options, RankPlan, Schedule, Traffic};
use pikv::report::Place;
use pikv::router::Eplb;
use pikv::shard::ShardMap;
use pikv::{Attend, AttendOutput, Backend, Cache, CacheConfig, Dtype, LayerShape};
use pikv_engine::common::cache::Cache as _;
use pikv_engine::common::sample::{SplitMix, sample};
use pikv_engine::moe::model::{Model, VOCAB};
use pikv_engine::moe::paged::Paged;
use std::error::Error;
use std::time::Instant;

const HELP: &str = "options: --ranks N (default 8; mpiexec and devices say otherwise), --backend cpu|cuda, --prompt N (bytes of the \
                    novel, default 1500), --tokens N (default 128), --stream N (default 131072)";
const BUDGET: u64 = 2 << 30;
/// Tokens of a prefill step.
const CHUNK: usize = 256;

/// Placement of the ranks.
enum World {
    Threads(u32),
    Devices(Vec<Backend>),
    #[cfg(feature = "mpi")]
    Processes(pikv_mpi::Mpi),
}

impl World {
    fn ranks(&self) -> u32 {
        match self {
            World::Threads(ranks) => *ranks,
            World::Devices(backends) => backends.len() as u32,
            #[cfg(feature = "mpi")]
            World::Processes(mpi) => mpi.ranks(),
        }
    }

    fn fabric(&self, config: &CacheConfig) -> Result<Box<dyn Fabric>, pikv::Error> {
        match self {
            World::Threads(ranks) => Ok(Box::new(InProcess::new(config, *ranks, BUDGET)?)),
            World::Devices(backends) => Ok(Box::new(InProcess::on(config, backends, BUDGET)?)),
            #[cfg(feature = "mpi")]
            World::Processes(mpi) => mpi.front(config, BUDGET),
        }
    }

    fn cache(&self, config: CacheConfig) -> Result<Cache, pikv::Error> {
        Cache::over(config.clone(), self.fabric(&config)?, Options::default())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut ranks, mut prompt, mut tokens, mut stream, mut devices) = (8, 1500, 128, 131_072, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(format!("{name}: of what? {HELP}"))?;
        if name == "--backend" {
            devices = match value.as_str() {
                "cpu" => false,
                "cuda" => true,
                _ => return Err(format!("no back end {value:?}; {HELP}").into()),
            };
            continue;
        }
        let number: usize = value.parse().map_err(|e| format!("{name} {value}: {e}; {HELP}"))?;
        match name.as_str() {
            "--ranks" => ranks = number as u32,
            "--prompt" => prompt = number,
            "--tokens" => tokens = number,
            "--stream" => stream = number,
            _ => return Err(format!("{name}: unknown; {HELP}").into()),
        }
    }
    let model = Model::load(&pikv_engine::example("models/austen-moe"))?;
    let world = match devices {
        true => {
            let all = (0..Backend::cuda_devices()?).map(Backend::cuda_device);
            World::Devices(all.collect::<Result<Vec<_>, _>>()?)
        }
        false => world(ranks)?,
    };
    let forms: Vec<CacheConfig> = std::iter::once(text_form(&model, world.ranks()))
        .chain(if stream > 0 {
            streams(world.ranks())?.into_iter().map(|s| s.config).collect()
        } else {
            vec![]
        })
        .collect();
    #[cfg(feature = "mpi")]
    if let World::Processes(mpi) = &world
        && mpi.rank() > 0
    {
        for form in &forms {
            mpi.serve(form, BUDGET, Options::default().timeout)?.check()?;
        }
        return Ok(());
    }
    let novel = std::fs::read(pikv_engine::example("text/northangerabbey.txt"))?;
    write(&model, &novel[..prompt.clamp(1, novel.len())], tokens, &world, &forms[0])?;
    if stream > 0 {
        let routes = experts(&model, &novel, stream)?;
        spread(&world, stream, &routes)?;
    }
    Ok(())
}

#[cfg(feature = "mpi")]
fn world(ranks: u32) -> Result<World, Box<dyn Error>> {
    // Set by the launchers of MPICH and Open MPI.
    let launched = ["PMI_RANK", "OMPI_COMM_WORLD_RANK"].iter().any(|name| std::env::var_os(name).is_some());
    Ok(if launched { World::Processes(pikv_mpi::Mpi::init()?) } else { World::Threads(ranks) })
}

#[cfg(not(feature = "mpi"))]
fn world(ranks: u32) -> Result<World, Box<dyn Error>> {
    Ok(World::Threads(ranks))
}

fn text_form(model: &Model, ranks: u32) -> CacheConfig {
    let c = model.config();
    let dim = c.head_dim as u32;
    let (kv_heads, query_heads) = (c.kv_heads as u32, c.query_heads as u32);
    let layer = LayerShape::new(kv_heads, query_heads, dim, Dtype::Bf16);
    let config = CacheConfig::new(vec![layer; c.layers], 256 << 20).ring(CHUNK as u32);
    config.experts(c.experts as u32, c.top_k as u32).shards(ShardMap::sum(ranks.max(1)).expect("a rank"))
}

/// A generated text and its logits.
struct Written {
    text: Vec<u8>,
    logits: Vec<u32>,
}

fn generate(
    model: &Model,
    prompt: &[u8],
    tokens: usize,
    paged: &mut Paged,
    after_prompt: impl FnOnce(&Paged) -> Result<(), Box<dyn Error>>,
) -> Result<Written, Box<dyn Error>> {
    let (mut logits, mut random, mut all) = (Vec::new(), SplitMix(1), Vec::new());
    let mut text = prompt.to_vec();
    for chunk in prompt.chunks(CHUNK) {
        model.forward(chunk, paged, &mut logits)?;
    }
    after_prompt(paged)?;
    for _ in 0..tokens {
        all.extend(logits.iter().map(|x| x.to_bits()));
        let next = sample(&logits[logits.len() - VOCAB..], 0.7, &mut random) as u8;
        text.push(next);
        model.forward(&[next], paged, &mut logits)?;
    }
    Ok(Written { text, logits: all })
}

/// Generates the text in one process and over the ranks, and prints bytes held and sent.
fn write(
    model: &Model,
    prompt: &[u8],
    tokens: usize,
    world: &World,
    form: &CacheConfig,
) -> Result<(), Box<dyn Error>> {
    let dim = model.config().head_dim;
    let one = generate(model, prompt, tokens, &mut Paged::new(Cache::new(form.clone())?, dim), |_| Ok(()))?;
    let mut paged = Paged::new(world.cache(form.clone())?, dim);
    let (mut of_prompt, mut after) = (Traffic::default(), Instant::now());
    let many = generate(model, prompt, tokens, &mut paged, |paged| {
        (of_prompt, after) = (paged.cache.traffic()?, Instant::now());
        Ok(())
    })?;
    let (to, took) = (paged.cache.traffic()?, after.elapsed().as_secs_f64());
    println!("{}\n", String::from_utf8_lossy(&many.text[prompt.len()..]));
    let differ = one.logits.iter().zip(&many.logits).filter(|(a, b)| a != b).count();
    let names = match world {
        World::Threads(_) => "threads",
        World::Devices(_) => "CUDA devices",
        #[cfg(feature = "mpi")]
        World::Processes(_) => "processes over MPI",
    };
    println!(
        "{} ranks, {names}: {differ} of {} logits differ from one process's",
        world.ranks(),
        many.logits.len()
    );
    let usage = paged.cache.ranks()?;
    let mean = usage.iter().map(|rank| rank.bytes).sum::<u64>() as f64 / usage.len() as f64;
    println!("\n{:>5} {:>10} {:>6} {:>8}", "rank", "bytes", "pages", "of mean");
    for rank in &usage {
        println!("{:>5} {:>10} {:>6} {:>8.3}", rank.rank, rank.bytes, rank.pages, rank.bytes as f64 / mean);
    }
    println!("front {:>10}  ring, and pages that fill up", paged.cache.usage().taken);
    let prefill = (of_prompt.sent + of_prompt.received) as f64;
    let decode = ((to.sent + to.received) as f64 - prefill) / tokens.max(1) as f64;
    println!("\na decode step: {decode:.0} bytes on the wire; the prompt: {prefill:.0}");
    let share = |t: &Traffic| t.waited.saturating_sub(t.computed).as_secs_f64();
    let wire = share(&to) - share(&of_prompt);
    println!(
        "of {took:.2} s after the prompt, {:.1} % on the way there and back ({:.1} % in waiting for ranks in all)",
        100.0 * wire / took,
        100.0 * (to.waited - of_prompt.waited).as_secs_f64() / took,
    );
    if differ > 0 || one.text != many.text { Err("the ranks change a bit".into()) } else { Ok(()) }
}

/// Experts of the first layer for each byte of a novel, as chosen by the model.
fn experts(model: &Model, novel: &[u8], n: usize) -> Result<Vec<u16>, Box<dyn Error>> {
    let mut cache = Chosen {
        inner: pikv_engine::moe::plain::PlainCache::new(
            model.config().layers,
            model.config().kv_heads,
            model.config().head_dim,
        ),
        first: Vec::new(),
        top_k: model.config().top_k,
    };
    let mut logits = Vec::new();
    // Windows of one step each, to save time.
    while cache.first.len() < n {
        for window in novel.chunks_exact(CHUNK) {
            if cache.first.len() >= n {
                break;
            }
            cache.clear();
            model.forward(window, &mut cache, &mut logits)?;
        }
    }
    cache.first.truncate(n);
    Ok(cache.first)
}

/// A cache that records the experts chosen by the router.
struct Chosen {
    inner: pikv_engine::moe::plain::PlainCache,
    first: Vec<u16>,
    top_k: usize,
}

struct ChosenStep<'a>(
    <pikv_engine::moe::plain::PlainCache as pikv_engine::common::cache::Cache>::Step<'a>,
    &'a mut Vec<u16>,
    usize,
);

impl pikv_engine::common::cache::Cache for Chosen {
    type Error = <pikv_engine::moe::plain::PlainCache as pikv_engine::common::cache::Cache>::Error;
    type Step<'a> = ChosenStep<'a>;

    fn begin(&mut self, n: usize) -> Result<ChosenStep<'_>, Self::Error> {
        Ok(ChosenStep(self.inner.begin(n)?, &mut self.first, self.top_k))
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn clear(&mut self) {
        self.inner.clear();
    }
}

impl pikv_engine::common::cache::Step for ChosenStep<'_> {
    type Error = <pikv_engine::moe::plain::PlainCache as pikv_engine::common::cache::Cache>::Error;

    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Self::Error> {
        self.0.layer(layer, q, k, v, out)
    }

    fn experts(&mut self, layer: usize, experts: &[u16]) -> Result<(), Self::Error> {
        if layer == 0 {
            self.1.extend(experts.iter().step_by(self.2));
        }
        self.0.experts(layer, experts)
    }

    fn commit(self) -> Result<(), Self::Error> {
        self.0.commit()
    }
}

/// A stream of tokens, with the shard map for it.
struct Stream {
    name: &'static str,
    map: &'static str,
    kind: Kind,
    experts: u32,
    eplb: bool,
    config: CacheConfig,
}

#[derive(Clone, Copy)]
enum Kind {
    Even,
    Moe,
    Skewed,
}

fn streams(ranks: u32) -> Result<Vec<Stream>, Box<dyn Error>> {
    let layer = LayerShape::new(8, 32, 128, Dtype::Bf16);
    // The paper's map needs a number of ranks that divides the experts.
    let paper = |tokens, experts: u32| ShardMap::xor(tokens, experts, ranks);
    let mut all = Vec::new();
    for (name, kind, experts) in [
        ("16 experts, evenly", Kind::Even, 16),
        ("the MoE on a novel, 8 experts", Kind::Moe, 8),
        ("16 experts, 60 % to one", Kind::Skewed, 16),
    ] {
        let maps = [
            ("paper: block XOR expert", paper(8, experts), false),
            ("(block + expert + head) mod ranks", ShardMap::sum(ranks), false),
            ("paper, whole experts (N_tok 1)", paper(1, experts), false),
            ("the same, then EPLB", paper(1, experts), true),
        ];
        for (map, made, eplb) in maps {
            let Ok(made) = made else { continue };
            let config = CacheConfig::new(vec![layer], BUDGET).ring(64).experts(experts, 1).shards(made);
            all.push(Stream { name, map, kind, experts, eplb, config });
        }
    }
    Ok(all)
}

/// Fills a cache with each stream, and prints how evenly pages are spread and the bytes that a step sends.
fn spread(world: &World, n: usize, routes: &[u16]) -> Result<(), Box<dyn Error>> {
    let ranks = world.ranks();
    let mut random = SplitMix(7);
    let even: Vec<u16> = (0..n).map(|_| (random.next() % 16) as u16).collect();
    let skewed: Vec<u16> =
        (0..n).map(|_| if random.unit() < 0.6 { 5 } else { (random.next() % 16) as u16 }).collect();
    println!(
        "\n{n} tokens of a layer, 32/8 heads of 128 channels in bf16, {ranks} ranks; bytes of the fullest rank over the mean, and with the front's \
         pages on rank 0\n\n{:30} {:30} {:>13} {:>13} {:>8} {:>8} {:>7} {:>11} {:>11}",
        "experts",
        "map",
        "bytes in all",
        "fullest rank",
        "of mean",
        "w. front",
        "moved",
        "bytes/step",
        "by formula"
    );
    let (k, v) = (vec![0.25; 512 * 1024], vec![0.5; 512 * 1024]);
    for Stream { name, map, kind, experts, eplb, config } in streams(ranks)? {
        let chosen: &[u16] = match kind {
            Kind::Even => &even,
            Kind::Moe => routes,
            Kind::Skewed => &skewed,
        };
        let cache = world.cache(config.clone())?;
        let mut sequence = cache.sequence();
        for part in chosen.chunks(512) {
            let mut step = cache.begin([(&mut sequence, part.len() as u32)])?;
            step.append(0, &k[..part.len() * 1024], &v[..part.len() * 1024])?;
            step.route(0, part)?;
            step.commit()?;
        }
        let moves = match eplb {
            false => None,
            true => {
                let loads = (0..experts as u16).map(|e| chosen.iter().filter(|c| **c == e).count() as f64);
                let replicas = (4 * experts).next_multiple_of(ranks);
                Some(cache.rebalance(0, &Eplb::global(replicas, ranks), Some(&loads.collect::<Vec<_>>()))?)
            }
        };
        let bytes: Vec<u64> = cache.ranks()?.iter().map(|rank| rank.bytes).collect();
        let of_mean = |bytes: &[u64]| {
            let sum: u64 = bytes.iter().sum();
            bytes.iter().copied().max().unwrap_or(0) as f64 * bytes.len() as f64 / sum as f64
        };
        let mut with_front = bytes.clone();
        with_front[0] += cache.usage().taken;
        let q = vec![0.01; 4096];
        let mut out = vec![0.0; 4096];
        let mut from = Traffic::default();
        let steps = 33;
        for t in 0..steps {
            // The first step sends the pages that are completed by it.
            if t == 1 {
                from = cache.traffic()?;
            }
            let mut step = cache.begin([(&mut sequence, 1)])?;
            step.append(0, &k[..1024], &v[..1024])?;
            step.attend(0, &q, &Attend::new(0.088), AttendOutput::new(&mut out))?;
            step.route(0, &chosen[t..t + 1])?;
            step.commit()?;
        }
        let to = cache.traffic()?;
        let measured = (to.sent + to.received - from.sent - from.received) as f64 / (steps - 1) as f64;
        let mut filed = vec![0; experts as usize];
        let mut at = std::collections::HashMap::new();
        for head in 0..8 {
            for page in sequence.pages(0, head as usize)? {
                if let Place::Run(e) = page.id.place {
                    filed[usize::from(e)] += if head == 0 { page.tokens } else { 0 };
                    at.entry((page.id.ordinal / 8, e, head)).or_insert(page.shard);
                }
            }
        }
        let of = |t, e, head| at.get(&(t, e, head)).copied().unwrap_or(0);
        let schedule = Schedule::new(&config, ranks, &filed, of)?;
        // With processes, rank 0 reaches its own pages without the wire; threads are all reached over it.
        let threads = matches!(world, World::Threads(_) | World::Devices(_));
        let of = |plan: &RankPlan| plan.exact.sent + plan.exact.received;
        let said: f64 = schedule
            .ranks
            .iter()
            .enumerate()
            .filter(|(rank, _)| threads || *rank > 0)
            .map(|(_, plan)| of(plan))
            .sum();
        println!(
            "{name:30} {map:30} {:>13} {:>13} {:>8.3} {:>8.3} {:>7} {measured:>11.0} {said:>11.0}",
            bytes.iter().sum::<u64>(),
            bytes.iter().max().unwrap_or(&0),
            of_mean(&bytes),
            of_mean(&with_front),
            moves.map_or("-".to_owned(), |moves| moves.moved.to_string()),
        );
    }
    Ok(())
}
