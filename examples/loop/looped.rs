//! A model in the closed loop: rows are routed before they attend, so that they read only the pages of their experts.

use crate::acts::Ranked;
use pikv::closed_loop::{LoopError, LoopStep};
use pikv::metrics::Collector;
use pikv::{Attend, AttendOutput, ClosedLoop, Sequence};
use pikv_engine::common::cache::{Cache as AnyCache, Step as AnyStep};
use pikv_engine::measure::results::cpu_time;
use std::sync::Arc;
use std::time::Duration;

pub struct Looped {
    pub pikv: ClosedLoop,
    pub sequence: Sequence,
    pub sink: Arc<Collector>,
    /// `[layers]`
    attend: Vec<Attend>,
    time: Duration,
    /// Tokens filed by each expert, over all layers.
    pub filed: Vec<u64>,
    /// Sum over all layers.
    pub ranked: Ranked,
}

impl Looped {
    /// `attend` gives the attention options of each layer.
    pub fn new(pikv: ClosedLoop, attend: Vec<Attend>) -> Looped {
        let sequence = pikv.cache().sequence();
        let experts = pikv.cache().config().experts as usize;
        let sink = Arc::new(Collector::new(experts));
        let pikv = pikv.sink(sink.clone());
        Looped {
            pikv,
            sequence,
            sink,
            attend,
            time: Duration::ZERO,
            filed: vec![0; experts],
            ranked: Ranked::default(),
        }
    }

    /// CPU time spent in the cache.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// The smallest of the experts' shares over the largest: 1 is balanced.
    pub fn balance(&self) -> f64 {
        let most = self.filed.iter().max().copied().unwrap_or(0);
        let least = self.filed.iter().min().copied().unwrap_or(0);
        if most == 0 { 1.0 } else { least as f64 / most as f64 }
    }
}

pub struct Step<'a> {
    step: LoopStep<'a>,
    attend: &'a [Attend],
    time: &'a mut Duration,
    filed: &'a mut [u64],
    ranked: &'a mut Ranked,
    routed: bool,
    top_k: usize,
}

impl Step<'_> {
    fn timed<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        let start = cpu_time();
        let result = f(self);
        *self.time += cpu_time() - start;
        result
    }
}

impl AnyCache for Looped {
    type Error = LoopError;
    type Step<'a> = Step<'a>;

    fn begin(&mut self, n: usize) -> Result<Step<'_>, LoopError> {
        let top_k = self.pikv.cache().config().top_k as usize;
        let routed = self.pikv.cache().config().experts > 1;
        let step = self.pikv.begin([(&mut self.sequence, n as u32)])?;
        let (time, filed, ranked) = (&mut self.time, &mut self.filed, &mut self.ranked);
        Ok(Step { step, attend: &self.attend, time, filed, ranked, routed, top_k })
    }

    fn len(&self) -> usize {
        self.sequence.next_position().0 as usize
    }

    fn clear(&mut self) {
        self.sequence.clear();
    }
}

impl AnyStep for Step<'_> {
    type Error = LoopError;
    const GATES: bool = true;

    fn gates(&mut self, layer: usize, logits: &[f32]) -> Result<(), LoopError> {
        if !self.routed {
            return Ok(());
        }
        let top_k = self.top_k;
        self.timed(|this| {
            let routes = this.step.route(layer, logits)?;
            this.ranked.count(routes, top_k);
            for chosen in routes.filing().experts.chunks_exact(top_k) {
                this.filed[usize::from(chosen[0])] += 1;
            }
            Ok(())
        })
    }

    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), LoopError> {
        self.timed(|this| {
            this.step.append(layer, k, v)?;
            this.step.attend(layer, q, &this.attend[layer], AttendOutput::new(out))
        })
    }

    /// The model keeps its own choice of experts; KV is filed and fetched by the router's.
    fn experts(&mut self, _: usize, _: &[u16]) -> Result<(), LoopError> {
        Ok(())
    }

    fn commit(self) -> Result<(), LoopError> {
        let start = cpu_time();
        let Step { step, time, .. } = self;
        let result = step.commit();
        *time += cpu_time() - start;
        result
    }
}
