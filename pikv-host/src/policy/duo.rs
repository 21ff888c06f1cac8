//! Duo: retrieval heads keep everything, streaming heads sinks and the newest, DuoAttention (arXiv 2410.10819).

use super::{Budget, Eviction, StreamingLlm};

/// Which KV heads are retrieval heads.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Duo {
    /// `[layers][kv_heads]`, in 0..=1: how much a head needs all of its tokens.
    pub gates: Vec<Vec<f32>>,
    /// From here on a gate is open; 0.5 by default.
    pub threshold: f32,
    /// Tokens of a streaming head, sinks and ring among them.
    pub streaming: u32,
}

setters!(Duo { threshold: f32 });

impl Duo {
    /// Heads with a gate of at least 0.5 keep everything, the others `streaming` tokens.
    pub fn new(gates: Vec<Vec<f32>>, streaming: u32) -> Duo {
        Duo { gates, threshold: 0.5, streaming }
    }

    /// Reads a pattern as the authors publish it: a line a layer, the gates of its KV heads separated by tabs, blanks or commas. Gates
    /// outside 0..=1, which training leaves a hair below 0 or above 1, are taken as 0 or 1, as the authors' own loader does.
    ///
    /// # Errors
    /// The line and what stands there instead of a finite number.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::policy::Duo;
    /// let duo = Duo::parse("9.0625e-01\t-9.584426879882812500e-05\n1.0003\t0.5\n", 384)?;
    /// assert_eq!(duo.gates, [[0.90625, 0.0], [1.0, 0.5]]);
    /// # Ok::<(), String>(())
    /// ```
    pub fn parse(pattern: &str, streaming: u32) -> Result<Duo, String> {
        let gate = |(line, text): (usize, &str)| match text.parse::<f32>() {
            Ok(gate) if gate.is_finite() => Ok(if gate > 0.0 { gate.min(1.0) } else { 0.0 }),
            _ => Err(format!(
                "line {}: {text:?} is no gate; gates are finite numbers, taken into 0..=1",
                line + 1
            )),
        };
        let split = |c: char| c == ',' || c.is_whitespace();
        let lines = pattern.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let layer = |(n, line): (usize, &str)| {
            line.split(split).filter(|text| !text.is_empty()).map(|text| gate((n, text))).collect()
        };
        Ok(Duo::new(lines.map(layer).collect::<Result<_, String>>()?, streaming))
    }

    /// The rule for a cache whose layers and heads are those of the gates.
    pub fn eviction(&self) -> Eviction {
        let head = |gate: &f32| if *gate >= self.threshold { Budget::ALL } else { self.streaming };
        let layers: Vec<Vec<u32>> = self.gates.iter().map(|heads| heads.iter().map(head).collect()).collect();
        Eviction::new(StreamingLlm, Budget::Heads(layers.into()))
    }
}
