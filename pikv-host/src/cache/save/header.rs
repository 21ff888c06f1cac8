//! Header of a saved sequence: a safetensors header in a canonical form, so that it is read without allocation.

use super::fingerprint::{PARTS, sum_of};
use crate::base::error::{Error, SaveError};
use crate::config::shape::CacheShape;
use crate::config::sharing::FEW;
use std::fmt::Write;

/// Value of `format` in the metadata.
const FORMAT: &str = "pikv sequence";
/// The newest readable version. Each sequence is written in the oldest version that can hold it.
const NEWEST: u64 = SHARED_ROUTERS;
/// First version with a token budget of the sequence.
pub const BUDGET: u64 = 2;
/// First version with the routers of a loop; its budget field is 0 for none.
pub const ROUTERS: u64 = 3;
/// First version in which experts share runs of pages, without routers and with them. In older ones each expert has a run.
pub const SHARED: u64 = 4;
const SHARED_ROUTERS: u64 = SHARED + 1;

/// Version for a sequence with or without a budget, and with or without routers.
pub fn version(shape: &CacheShape, budget: Option<u32>, routers: bool) -> u64 {
    match budget {
        _ if shape.config.experts > FEW => SHARED + u64::from(routers),
        _ if routers => ROUTERS,
        Some(_) => BUDGET,
        None => 1,
    }
}

/// Whether files of a version have the routers of a loop.
pub fn has_routers(version: u64) -> bool {
    matches!(version, ROUTERS | SHARED_ROUTERS)
}

/// Bytes of the length before the header.
pub const LENGTH: u64 = 8;
/// Bytes of the checksum.
pub const SUM: u64 = 32;
/// Most bytes of the header's metadata, and of its entry for a tensor.
const METADATA: u64 = 2048;
const LINE: u64 = 160;

/// A tensor: its name, and whether it has bytes or words.
pub struct Tensor {
    pub name: String,
    pub of: Of,
}

#[derive(Clone, Copy)]
pub enum Of {
    Bytes,
    Words,
}

impl Of {
    fn name(self) -> &'static str {
        match self {
            Of::Bytes => "U8",
            Of::Words => "U32",
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Of::Bytes => 1,
            Of::Words => 4,
        }
    }
}

/// Tensors of a saved sequence, in order: numbers of the sequence; for each layer numbers of its tokens, for each head numbers and pages,
/// then numbers and pages for rollbacks; in versions that have it the state of the loop's routers; the caller's bytes; the checksum of
/// everything before it.
pub fn tensors(version: u64, shape: &CacheShape) -> Vec<Tensor> {
    let words = |name: String| Tensor { name, of: Of::Words };
    let mut all = vec![words("sequence".to_owned())];
    for (l, layer) in shape.config.layers.iter().enumerate() {
        all.push(words(format!("layers.{l}.state")));
        let heads = (0..layer.kv_heads).map(|h| format!("layers.{l}.heads.{h}"));
        for part in heads.chain([format!("layers.{l}.past")]) {
            all.extend([words(format!("{part}.state")), words(format!("{part}.pages"))]);
        }
    }
    if has_routers(version) {
        all.push(words("routers".to_owned()));
    }
    all.extend(["note", "sum"].map(|name| Tensor { name: name.to_owned(), of: Of::Bytes }));
    all
}

/// Most bytes of a header.
pub fn most(shape: &CacheShape) -> u64 {
    METADATA + LINE * tensors(NEWEST, shape).len() as u64
}

/// The header, preceded by its length, for tensors with these numbers of elements.
pub fn write(version: u64, shape: &CacheShape, tensors: &[Tensor], elements: &[u64]) -> Vec<u8> {
    let mut text = format!("{{\"__metadata__\":{{\"format\":\"{FORMAT}\",\"version\":\"{version}\"");
    for part in &PARTS {
        // Writing to a string cannot fail.
        let _ = write!(text, ",\"{}\":\"{}\"", part.key, sum_of(part, shape));
    }
    text.push('}');
    let mut at = 0;
    for (tensor, n) in tensors.iter().zip(elements) {
        let end = at + n * tensor.of.bytes();
        let (name, of) = (&tensor.name, tensor.of.name());
        let _ =
            write!(text, ",\"{name}\":{{\"dtype\":\"{of}\",\"shape\":[{n}],\"data_offsets\":[{at},{end}]}}");
        at = end;
    }
    text.push('}');
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Parses a header without its length: version, tensors, and elements of each tensor.
///
/// # Errors
/// [`SaveError`]: another format, a later version, the first part of the configuration that differs, or text that [`write()`] does not
/// produce.
pub fn read(header: &[u8], shape: &CacheShape) -> Result<(u64, Vec<Tensor>, Vec<u64>), Error> {
    let mut text = Text { all: header, at: 0 };
    text.literal(&format!("{{\"__metadata__\":{{\"format\":\"{FORMAT}\",\"version\":\""))?;
    let version = text.number()?;
    if version > NEWEST {
        return Err(SaveError::Version { found: version, newest: NEWEST }.into());
    }
    if version < 1 {
        return Err(text.wanted("a version from 1 on"));
    }
    for part in &PARTS {
        text.literal(&format!("\",\"{}\":\"", part.key))?;
        let found = text.take(64)?;
        if found != sum_of(part, shape).as_bytes() {
            return Err(SaveError::Configuration { part: part.is }.into());
        }
    }
    text.literal("\"}")?;
    let tensors = tensors(version, shape);
    let (mut at, mut elements) = (0u64, Vec::with_capacity(tensors.len()));
    for tensor in &tensors {
        let (name, of) = (&tensor.name, tensor.of.name());
        text.literal(&format!(",\"{name}\":{{\"dtype\":\"{of}\",\"shape\":["))?;
        let n = text.number()?;
        let end = n.checked_mul(tensor.of.bytes()).and_then(|bytes| bytes.checked_add(at));
        let end = end.ok_or_else(|| text.wanted("a length that memory can have"))?;
        text.literal(&format!("],\"data_offsets\":[{at},{end}]}}"))?;
        elements.push(n);
        at = end;
    }
    if elements.last() != Some(&SUM) {
        return Err(text.wanted("a sum of 32 bytes"));
    }
    text.literal("}")?;
    let rest = &text.all[text.at..];
    if rest.len() >= 8 || rest.iter().any(|c| *c != b' ') {
        return Err(text.wanted("up to 7 blanks and the end of the header"));
    }
    Ok((version, tensors, elements))
}

/// A header and the position in it.
struct Text<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Text<'a> {
    fn wanted(&self, wanted: &str) -> Error {
        let wanted = wanted.to_owned();
        SaveError::Header { at: LENGTH + self.at as u64, wanted }.into()
    }

    fn literal(&mut self, literal: &str) -> Result<(), Error> {
        if !self.all[self.at..].starts_with(literal.as_bytes()) {
            return Err(self.wanted(literal));
        }
        self.at += literal.len();
        Ok(())
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let found = self.all[self.at..].get(..n).ok_or_else(|| self.wanted("a sum of 64 digits"))?;
        self.at += n;
        Ok(found)
    }

    fn number(&mut self) -> Result<u64, Error> {
        let digits = self.all[self.at..].iter().take_while(|c| c.is_ascii_digit()).count();
        let text = &self.all[self.at..self.at + digits];
        let number = text.iter().try_fold(0u64, |n, c| n.checked_mul(10)?.checked_add(u64::from(c - b'0')));
        // Numbers must be in canonical form.
        let plain = digits == 1 || text.first().is_some_and(|c| *c != b'0');
        let number = number.filter(|_| plain).ok_or_else(|| self.wanted("a number of 64 bits"))?;
        self.at += digits;
        Ok(number)
    }
}
