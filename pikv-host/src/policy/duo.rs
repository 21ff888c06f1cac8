//! Duo: retrieval heads keep everything, streaming heads sinks and the newest, DuoAttention (arXiv 2410.10819).

use super::{Budget, Eviction, StreamingLlm};

/// Which KV heads are retrieval heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Duo {
    /// `[layers][kv_heads]`, in 0..=1: how much a head needs all of its tokens.
    pub gates: Vec<Vec<f32>>,
    /// From here on a gate is open; 0.5 by default.
    pub threshold: f32,
    /// Tokens of a streaming head, sinks and ring among them.
    pub streaming: u32,
}

impl Duo {
    /// Heads with a gate of at least 0.5 keep everything, the others `streaming` tokens.
    pub fn new(gates: Vec<Vec<f32>>, streaming: u32) -> Duo {
        Duo { gates, threshold: 0.5, streaming }
    }

    /// Reads a pattern as the authors publish it: a line a layer, the gates of its KV heads separated by tabs, blanks or commas.
    ///
    /// # Errors
    /// The line and what stands there instead of a number in 0..=1.
    pub fn parse(pattern: &str, streaming: u32) -> Result<Duo, String> {
        let gate = |(line, text): (usize, &str)| match text.parse::<f32>() {
            Ok(gate) if (0.0..=1.0).contains(&gate) => Ok(gate),
            _ => Err(format!("line {}: {text:?} is no gate; gates are numbers in 0..=1", line + 1)),
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
