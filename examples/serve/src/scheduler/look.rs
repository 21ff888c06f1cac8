//! Memory usage and counts of the scheduler.

use super::request::Request;
use pikv::metrics::PrefixUsage;
use pikv::report::{Place, Usage};
use pikv::{Cache, LayerShape};
use serde_json::{Value, json};
use std::time::Duration;

/// Number of times, and their sum.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub count: u64,
    pub sum: Duration,
}

impl Times {
    pub fn add(&mut self, time: Duration) {
        self.count += 1;
        self.sum += time;
    }
}

/// Counts since the start, each with a help text.
macro_rules! counts {
    ($($name:ident $help:literal)*) => {
        #[derive(Clone, Debug, Default)]
        pub struct Counts {
            $(#[doc = $help] pub $name: u64,)*
            pub first_token: Times,
            pub between_tokens: Times,
        }

        impl Counts {
            /// Name, help text and value of each count.
            pub fn named(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), $help, self.$name)),*]
            }
        }
    };
}

counts! {
    requests "Requests that reached the scheduler."
    finished "Requests that were answered whole."
    failed "Requests that ended with an error in the scheduler."
    hung_up "Requests whose client hung up."
    parked "Times that a request came back from host memory."
    recomputed "Times that a request was put back to be computed again."
    unpublished "Prefixes that could not be taken in."
    unsaved "Answered requests that could not be saved."
    steps "Steps of the cache."
    rows "Tokens that steps computed."
    generated "Tokens that were chosen."
}

/// Memory usage at one time.
#[derive(Clone, Debug)]
pub struct Look {
    /// The open requests with their bytes, as JSON for the page.
    pub rows: Vec<Value>,
    pub usage: Usage,
    /// Bytes of all sequences' pages by expert.
    pub experts: Vec<u64>,
    /// `None` without an index.
    pub prefixes: Option<PrefixUsage>,
    /// Pages that attention read from lower tiers.
    pub fetched: u64,
    pub counts: Counts,
}

impl Look {
    pub(super) fn new(
        cache: &Cache,
        prefixes: Option<PrefixUsage>,
        requests: &mut [Request],
        counts: Counts,
    ) -> Look {
        let mut experts = vec![0; cache.config().experts as usize];
        let layers = &cache.config().layers;
        let rows = requests.iter_mut().map(|request| row(request, layers, &mut experts)).collect();
        let fetches = cache.fetches();
        let fetched = fetches.in_place + fetches.ahead + fetches.awaited;
        Look { rows, usage: cache.usage(), experts, prefixes, fetched, counts }
    }
}

/// A request as JSON: tokens of the prompt, of those found in the index, computed, and generated; bytes of the ring, of unpacked pages, of
/// packed pages, of pages in lower tiers, and of all pages shared with others.
fn row(request: &mut Request, layers: &[LayerShape], experts: &mut [u64]) -> Value {
    let (mut ring, mut filed, mut packed, mut lower, mut shared) = (0, 0, 0, 0, 0);
    let state = match &request.sequence {
        None => "waiting",
        Some(sequence) if sequence.is_parked() => {
            lower = sequence.bytes();
            "parked"
        }
        Some(_) if request.generated() == 0 => "prompt",
        Some(_) => "answer",
    };
    let sequence = request.active().map(|(sequence, _)| sequence);
    let heads = (0..).zip(layers).flat_map(|(l, layer)| (0..layer.kv_heads as usize).map(move |h| (l, h)));
    for page in heads.filter_map(|(layer, head)| sequence.as_ref()?.pages(layer, head).ok()).flatten() {
        let part = match page.id.place {
            _ if page.tier > 0 => &mut lower,
            Place::Ring => &mut ring,
            _ if page.packed => &mut packed,
            _ => &mut filed,
        };
        *part += page.bytes;
        shared += if page.shared { page.bytes } else { 0 };
        if let Place::Run(expert) = page.id.place
            && let Some(bytes) = experts.get_mut(usize::from(expert))
        {
            *bytes += page.bytes;
        }
    }
    drop(sequence);
    json!({
        "id": request.id, "state": state, "prompt": request.job.prompt.len(), "cached": request.cached,
        "computed": request.computed(), "generated": request.generated(), "ring": ring, "filed": filed, "packed": packed,
        "lower": lower, "shared": shared,
    })
}
