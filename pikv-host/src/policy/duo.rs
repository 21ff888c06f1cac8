//! Duo: retrieval heads keep every token, streaming heads the sinks and the newest tokens, DuoAttention (arXiv 2410.10819).

use super::{Budget, Eviction, StreamingLlm};
use thiserror::Error;

/// The split of KV heads into retrieval and streaming heads.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Duo {
    /// `[layers][kv_heads]`, in 0..=1: how much a head depends on having all of its tokens.
    pub gates: Vec<Vec<f32>>,
    /// Smallest gate of a retrieval head; 0.5 by default.
    pub threshold: f32,
    /// Tokens that a streaming head keeps, including sinks and ring.
    pub streaming: u32,
}

/// A text in a pattern that is not a finite number.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {text:?} is no gate; gates are finite numbers, taken into 0..=1")]
#[non_exhaustive]
pub struct DuoError {
    /// Line of the pattern, counted from 1.
    pub line: usize,
    /// The text.
    pub text: String,
}

setters!(Duo { threshold: f32 });

impl Duo {
    /// Heads with a gate of at least 0.5 keep every token, the others `streaming` tokens.
    pub fn new(gates: Vec<Vec<f32>>, streaming: u32) -> Duo {
        Duo { gates, threshold: 0.5, streaming }
    }

    /// Reads a pattern in the authors' published form: a line a layer, the gates of its KV heads separated by tabs, blanks or commas. Gates
    /// slightly outside 0..=1, as training leaves them, are clamped, as in the authors' loader.
    ///
    /// # Errors
    /// [`DuoError`] for a gate that is not a finite number.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::policy::Duo;
    /// let duo = Duo::parse("9.0625e-01\t-9.584426879882812500e-05\n1.0003\t0.5\n", 384)?;
    /// assert_eq!(duo.gates, [[0.90625, 0.0], [1.0, 0.5]]);
    /// # Ok::<(), pikv::policy::DuoError>(())
    /// ```
    pub fn parse(pattern: &str, streaming: u32) -> Result<Duo, DuoError> {
        let gate = |(line, text): (usize, &str)| match text.parse::<f32>() {
            Ok(gate) if gate.is_finite() => Ok(if gate > 0.0 { gate.min(1.0) } else { 0.0 }),
            _ => Err(DuoError { line: line + 1, text: text.to_owned() }),
        };
        let split = |c: char| c == ',' || c.is_whitespace();
        let lines = pattern.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let layer = |(n, line): (usize, &str)| {
            line.split(split).filter(|text| !text.is_empty()).map(|text| gate((n, text))).collect()
        };
        Ok(Duo::new(lines.map(layer).collect::<Result<_, DuoError>>()?, streaming))
    }

    /// The eviction rule, for a cache with the layers and KV heads of the gates.
    pub fn eviction(&self) -> Eviction {
        let head = |gate: &f32| if *gate >= self.threshold { Budget::ALL } else { self.streaming };
        let layers: Vec<Vec<u32>> = self.gates.iter().map(|heads| heads.iter().map(head).collect()).collect();
        Eviction::new(StreamingLlm, Budget::Heads(layers.into()))
    }
}
