//! Writes valid and invalid GGUF files.

use std::collections::BTreeMap;

/// A file being written.
#[derive(Clone)]
pub struct Writer {
    pub version: u32,
    pub alignment: usize,
    /// Metadata: name, type and value as they lie in the file.
    pub pairs: BTreeMap<String, Vec<u8>>,
    /// Name, dimensions, form, data.
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

pub fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat()
}

impl Writer {
    pub fn new() -> Self {
        Self { version: 3, alignment: 32, pairs: BTreeMap::new(), tensors: Vec::new() }
    }

    pub fn pair(&mut self, name: &str, of: u32, value: &[u8]) -> &mut Self {
        self.pairs.insert(name.into(), [&of.to_le_bytes(), value].concat());
        self
    }

    pub fn whole(&mut self, name: &str, value: u32) -> &mut Self {
        self.pair(name, 4, &value.to_le_bytes())
    }

    pub fn real(&mut self, name: &str, value: f32) -> &mut Self {
        self.pair(name, 6, &value.to_le_bytes())
    }

    pub fn text(&mut self, name: &str, value: &str) -> &mut Self {
        self.pair(name, 8, &string(value))
    }

    pub fn array(&mut self, name: &str, of: u32, count: usize, values: &[u8]) -> &mut Self {
        self.pair(name, 9, &[&of.to_le_bytes()[..], &(count as u64).to_le_bytes(), values].concat())
    }

    pub fn texts(&mut self, name: &str, values: &[&str]) -> &mut Self {
        let bytes: Vec<u8> = values.iter().flat_map(|s| string(s)).collect();
        self.array(name, 8, values.len(), &bytes)
    }

    pub fn tensor(&mut self, name: &str, dims: &[u64], form: u32, data: Vec<u8>) -> &mut Self {
        self.tensors.push((name.into(), dims.to_vec(), form, data));
        self
    }

    pub fn f32s(&mut self, name: &str, dims: &[u64], values: &[f32]) -> &mut Self {
        self.tensor(name, dims, 0, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (name, value) in &self.pairs {
            out.extend(string(name));
            out.extend(value);
        }
        let mut data = Vec::new();
        for (name, dims, form, bytes) in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            out.extend(string(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(form.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}
