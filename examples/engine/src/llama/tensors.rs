//! The tensors of a Llama in a GGUF file, as parts of a model.

use super::gguf::Gguf;
use super::quant::Kind;
use crate::common::blocks::{Blocks, Form};
use crate::common::layers::Matrix;
use std::collections::BTreeSet;
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How a model holds the matrices of its products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// In f32.
    #[default]
    F32,
    /// In the file's own blocks where these are Q4_1 or Q8_0, else in f32. The weights are the same, in a fifth or a quarter of the memory:
    /// a few rows take less time. The order of sums is another, so last bits differ.
    Stored,
}

/// A matrix of the file.
pub struct Part {
    pub name: String,
    pub outputs: usize,
    /// Channels of a head, and those with RoPE, if outputs are heads whose channels are reordered.
    pub turned: Option<(usize, usize)>,
}

impl Part {
    /// Reorders channels of rows of `n` elements, `[heads][head_dim][n]`. The file rotates channels `2 i` and `2 i + 1` together; this code
    /// rotates `i` and `i + rotary_dim / 2`. Products of queries and keys stay the same, as both are reordered.
    fn ordered<T: Copy>(&self, rows: Vec<T>) -> Vec<T> {
        let Some((head_dim, rotary_dim)) = self.turned else { return rows };
        let n = rows.len() / self.outputs;
        let mut out = Vec::with_capacity(rows.len());
        for head in rows.chunks_exact(head_dim * n) {
            let order =
                (0..rotary_dim).step_by(2).chain((1..rotary_dim).step_by(2)).chain(rotary_dim..head_dim);
            order.for_each(|channel| out.extend_from_slice(&head[channel * n..][..n]));
        }
        out
    }
}

/// The tensors of a file, and which of them were not read.
pub struct Tensors<'a> {
    gguf: &'a Gguf,
    weights: Weights,
    unread: BTreeSet<&'a str>,
}

impl<'a> Tensors<'a> {
    pub fn new(gguf: &'a Gguf, weights: Weights) -> Tensors<'a> {
        Tensors { gguf, weights, unread: gguf.tensors().collect() }
    }

    /// The values of a tensor in f32.
    pub fn values(&mut self, name: &str, dims: &[usize]) -> Result<Vec<f32>> {
        self.unread.remove(name);
        self.gguf.tensor(name, dims)
    }

    /// Joins matrices side by side.
    pub fn matrix(&mut self, inputs: usize, parts: &[Part]) -> Result<Matrix> {
        let mut read = Vec::new();
        for part in parts {
            self.unread.remove(&*part.name);
            read.push(self.gguf.stored(&part.name, &[inputs, part.outputs])?);
        }
        let all = |kind| read.iter().all(|(of, _)| *of == kind);
        let form = if all(Kind::Q4_1) { Some(Form::Four) } else { all(Kind::Q8_0).then_some(Form::Eight) };
        let parts = parts.iter().zip(&read);
        Ok(match form.filter(|_| self.weights == Weights::Stored) {
            Some(form) => {
                let parts: Vec<_> = parts.map(|(part, (_, bytes))| part.ordered(bytes.to_vec())).collect();
                Matrix::of_blocks(inputs, Blocks::new(form, inputs, &parts))
            }
            None => {
                let parts: Vec<_> =
                    parts.map(|(part, (kind, bytes))| part.ordered(kind.to_f32(bytes))).collect();
                Matrix::new(inputs, &parts)
            }
        })
    }

    /// # Errors
    /// A tensor that was not read.
    pub fn done(self) -> Result<()> {
        match self.unread.first() {
            Some(name) => Err(format!("tensor {name:?}: no part of a Llama that is run here").into()),
            None => Ok(()),
        }
    }
}
