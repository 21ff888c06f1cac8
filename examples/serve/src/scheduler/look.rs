//! Where bytes are, and what was counted.

use super::request::{Place, Request};
use pikv::metrics::PrefixUsage;
use pikv::report::{PageInfo, Place as PagePlace};
use pikv::{Cache, Sequence};
use serde_json::{Value, json};
use std::time::Duration;

/// A number of times, and their sum.
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

/// Counts since the start, each with what it counts.
macro_rules! counts {
    ($($name:ident $help:literal)*) => {
        #[derive(Clone, Debug, Default)]
        pub struct Counts {
            $(#[doc = $help] pub $name: u64,)*
            pub first_token: Times,
            pub between_tokens: Times,
        }

        impl Counts {
            /// Name, what it counts, and how many there were.
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
    parked "Times that a request was moved to host memory."
    recomputed "Times that a request was put back to be computed again."
    unpublished "Prefixes that could not be taken in."
    steps "Steps of the cache."
    rows "Tokens that steps computed."
    generated "Tokens that were chosen."
}

/// Where bytes are at one time.
#[derive(Clone, Debug)]
pub struct Look {
    /// The open requests with their bytes, as the page reads them.
    pub rows: Vec<Value>,
    pub taken: u64,
    pub budget: u64,
    /// Name, bytes and capacity of each lower tier.
    pub tiers: Vec<(String, u64, u64)>,
    /// Bytes of all sequences' pages by expert.
    pub experts: Vec<u64>,
    /// None without an index.
    pub prefixes: Option<PrefixUsage>,
    /// Pages that attention read from lower tiers.
    pub fetched: u64,
    pub counts: Counts,
}

impl Look {
    pub(super) fn new(
        cache: &Cache,
        prefixes: Option<PrefixUsage>,
        requests: &[Request],
        counts: Counts,
    ) -> Look {
        let (usage, fetches) = (cache.usage(), cache.fetches());
        let mut experts = vec![0; cache.config().experts as usize];
        let layers = &cache.config().layers;
        let heads: Vec<(usize, usize)> = layers
            .iter()
            .enumerate()
            .flat_map(|(layer, shape)| (0..shape.kv_heads as usize).map(move |head| (layer, head)))
            .collect();
        let rows = requests.iter().map(|request| row(request, &heads, &mut experts)).collect();
        Look {
            rows,
            taken: usage.taken,
            budget: usage.budget,
            tiers: usage.tiers.into_iter().map(|tier| (tier.name, tier.bytes, tier.capacity)).collect(),
            experts,
            prefixes,
            fetched: fetches.in_place + fetches.ahead + fetches.awaited,
            counts,
        }
    }
}

/// A request: tokens of its prompt, of those how many the index found, tokens that are computed, and generated; bytes of its ring, of pages of
/// experts that are not packed, of packed ones, of pages in lower tiers, and of all those that others read too.
fn row(request: &Request, heads: &[(usize, usize)], experts: &mut [u64]) -> Value {
    let (mut ring, mut filed, mut packed, mut lower, mut shared) = (0, 0, 0, 0, 0);
    let state = match &request.place {
        Place::Waiting => "waiting",
        Place::Parked(parked) => {
            lower = parked.bytes();
            "parked"
        }
        Place::Active(_) if request.generated() == 0 => "prompt",
        Place::Active(_) => "answer",
    };
    let pages = |sequence: &Sequence| -> Vec<PageInfo> {
        let pages = heads.iter().flat_map(|(layer, head)| sequence.pages(*layer, *head));
        pages.flatten().collect()
    };
    for page in request.active().map(pages).unwrap_or_default() {
        let part = match page.id.place {
            _ if page.tier > 0 => &mut lower,
            PagePlace::Ring => &mut ring,
            _ if page.packed => &mut packed,
            _ => &mut filed,
        };
        *part += page.bytes;
        shared += if page.shared { page.bytes } else { 0 };
        if let PagePlace::Expert(expert) = page.id.place
            && let Some(bytes) = experts.get_mut(usize::from(expert))
        {
            *bytes += page.bytes;
        }
    }
    json!({
        "id": request.id, "state": state, "prompt": request.job.prompt.len(), "cached": request.cached,
        "computed": request.computed(), "generated": request.generated(), "ring": ring, "filed": filed, "packed": packed,
        "lower": lower, "shared": shared,
    })
}
