//! Load generator: clients that send requests, read, and disconnect, and the times they measure.

use crate::client::complete;
use crate::model::Model;
use crate::{Options, Server};
use pikv_engine::common::sample::SplitMix;
use pikv_engine::measure::results::command;
use pikv_engine::measure::rows::{provenance, replace_rows};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const COLUMNS: &str = "clients,prefix_index,tokens_s,ttft_p50_ms,ttft_p99_ms,itl_p50_ms,itl_p99_ms,errors,left_bytes,machine,date,commit,command";
/// Expected errors under load; others are counted as undocumented.
const DOCUMENTED: [&str; 2] = ["too_many_requests", "deadline_exceeded"];

/// Parameters of the load.
#[derive(Clone, Debug)]
pub struct Load {
    pub clients: usize,
    pub seconds: Duration,
    /// Bytes of the first tier, and of the system prompt that half of the prompts begin with.
    pub budget: u64,
    pub system: usize,
    /// Most tokens of a prompt and of an answer.
    pub prompt: usize,
    pub answer: usize,
    /// One of this many requests is cancelled halfway.
    pub hang_up: u64,
    pub csv: Option<PathBuf>,
}

impl Default for Load {
    fn default() -> Load {
        // A request of the repository's model takes about 1.5 MiB: the budget fits a third of 64.
        let (budget, seconds) = (32 << 20, Duration::from_secs(60));
        Load { clients: 64, seconds, budget, system: 512, prompt: 1900, answer: 64, hang_up: 10, csv: None }
    }
}

/// Times, counts and errors of the clients.
#[derive(Debug, Default)]
pub struct Seen {
    pub first: Vec<Duration>,
    pub between: Vec<Duration>,
    pub tokens: u64,
    pub answers: u64,
    pub hung_up: u64,
    /// Errors by code, including documented ones.
    pub errors: BTreeMap<String, u64>,
}

impl Seen {
    /// Number of undocumented errors.
    pub fn undocumented(&self) -> u64 {
        self.errors.iter().filter(|(code, _)| !DOCUMENTED.contains(&code.as_str())).map(|(_, n)| n).sum()
    }

    fn join(mut self, other: Seen) -> Seen {
        self.first.extend(other.first);
        self.between.extend(other.between);
        self.tokens += other.tokens;
        self.answers += other.answers;
        self.hung_up += other.hung_up;
        for (code, n) in other.errors {
            *self.errors.entry(code).or_default() += n;
        }
        self
    }
}

/// Runs the clients for the given time.
pub fn run(at: SocketAddr, model: &str, text: &str, load: &Load) -> Seen {
    let end = Instant::now() + load.seconds;
    std::thread::scope(|scope| {
        let client = |seed| scope.spawn(move || client(at, model, text, load, seed, end));
        let clients: Vec<_> = (0..load.clients as u64).map(client).collect();
        clients.into_iter().fold(Seen::default(), |seen, client| match client.join() {
            Ok(other) => seen.join(other),
            Err(_) => seen,
        })
    })
}

fn client(at: SocketAddr, model: &str, text: &str, load: &Load, seed: u64, end: Instant) -> Seen {
    let (mut random, mut seen) = (SplitMix(seed), Seen::default());
    while Instant::now() < end {
        let below = |random: &mut SplitMix, n: usize| (random.next() % n.max(1) as u64) as usize;
        let length = 10 + below(&mut random, load.prompt.saturating_sub(10));
        let own = below(&mut random, text.len() - load.prompt);
        let system = if random.next().is_multiple_of(2) { load.system.min(length) } else { 0 };
        let prompt = format!("{}{}", &text[..system], &text[own..own + length - system]);
        let (answer, seed) = (1 + below(&mut random, load.answer), random.next() >> 1);
        let body =
            json!({"model": model, "prompt": prompt, "max_tokens": answer, "seed": seed, "stream": true});
        let give_up = random.next().is_multiple_of(load.hang_up.max(1));
        if let Err(error) = one(at, &body, give_up.then_some(answer / 2), &mut seen) {
            *seen.errors.entry(error.to_string()).or_default() += 1;
        }
    }
    seen
}

/// Runs one request; with `most`, cancels it after this many events.
fn one(at: SocketAddr, body: &Value, most: Option<usize>, seen: &mut Seen) -> Result<(), Box<dyn Error>> {
    let came = Instant::now();
    let mut reply = complete(at, body)?;
    if reply.status != 200 {
        let error = reply.json()?;
        let code = error["error"]["code"].as_str().unwrap_or("an error without a code").to_string();
        // After a refusal, retry a little later.
        std::thread::sleep(Duration::from_millis(20));
        return Err(code.into());
    }
    let (mut last, mut events) = (came, 0);
    while let Some(lines) = reply.body.events()? {
        for line in lines {
            if line == "[DONE]" {
                seen.answers += 1;
                return Ok(());
            }
            let event: Value = serde_json::from_str(&line)?;
            if let Some(code) = event["error"]["code"].as_str() {
                return Err(code.into());
            }
            if event["choices"][0]["finish_reason"].is_null() {
                let now = Instant::now();
                if events == 0 { &mut seen.first } else { &mut seen.between }.push(now - last);
                (last, events, seen.tokens) = (now, events + 1, seen.tokens + 1);
            }
        }
        if most.is_some_and(|most| events >= most) {
            seen.hung_up += 1;
            return Ok(());
        }
    }
    Err("a stream without an end".into())
}

/// Quantile of `times`, in milliseconds.
fn quantile(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    let at = (times.len() as f64 * share) as usize;
    times.get(at.min(times.len().saturating_sub(1))).map_or(0.0, |time| time.as_secs_f64() * 1e3)
}

/// Measures the load with and without the prefix index.
///
/// # Errors
/// If the server does not start, for undocumented errors, or if pages are left in use.
pub fn measure(model: &Arc<Model>, load: &Load) -> Result<(), Box<dyn Error>> {
    let text = std::fs::read_to_string(pikv_engine::example("text/northangerabbey.txt"))?;
    // ASCII only, so that the text can be cut anywhere.
    let text: String = text.chars().filter(char::is_ascii).collect();
    let mut faults = Vec::new();
    for prefixes in [0, load.budget / 4] {
        let options = Options {
            budget: load.budget,
            parking: load.budget,
            prefixes,
            deadline: Duration::from_secs(180),
            ..Options::default()
        };
        let server = Server::start(model.clone(), options, ([127, 0, 0, 1], 0).into())?;
        let began = Instant::now();
        let mut seen = run(server.address, &model.name, &text, load);
        let rate = seen.tokens as f64 / began.elapsed().as_secs_f64();
        let look = at_rest(&server).ok_or("the scheduler stopped")?;
        let [first_50, first_99] = [0.5, 0.99].map(|share| quantile(&mut seen.first, share));
        let [between_50, between_99] = [0.5, 0.99].map(|share| quantile(&mut seen.between, share));
        let (errors, clients) = (seen.undocumented(), load.clients);
        let row = format!(
            "{clients},{},{rate:.0},{first_50:.1},{first_99:.1},{between_50:.1},{between_99:.1},{errors},{}",
            prefixes > 0,
            look.usage.taken
        );
        println!(
            "{row}\n{} answers, {} hung up, errors {:?}\n{:?}",
            seen.answers, seen.hung_up, seen.errors, look.counts
        );
        if let Some(path) = &load.csv {
            // In the place of a row with as many clients, and with or without the index.
            replace_rows(path, COLUMNS, [0, 1], &[format!("{row},{}", provenance(&command("-p serve"))?)])?;
        }
        if errors > 0 || look.usage.taken > 0 {
            faults.push(row);
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(format!("errors, or bytes that are left: {faults:?}").into()) }
}

/// Memory usage once all requests are over and prefixes are dropped.
pub fn at_rest(server: &Server) -> Option<Arc<crate::scheduler::Look>> {
    for _ in 0..3000 {
        let look = server.clear_prefixes()?;
        if look.rows.is_empty() {
            return Some(look);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    server.clear_prefixes()
}
