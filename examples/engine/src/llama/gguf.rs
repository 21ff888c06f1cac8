//! Reads GGUF files (versions 2 and 3, little-endian): metadata, and tensors as f32.
//!
//! Every count and length is checked against the bytes left before it is used: a broken file gives an error that names the byte or the
//! tensor, and takes no more memory than its own size.

use super::quant::Kind;
use std::collections::BTreeMap;
use std::{error::Error, fs::File, ops::Deref, path::Path, str};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Bytes of a file, and its parsed header.
pub struct Gguf {
    bytes: Box<dyn Deref<Target = [u8]>>,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

/// A metadata value. Strings and arrays are ranges of the file, already checked.
enum Value {
    Unsigned(u64),
    Signed(i64),
    Real(f64),
    Bool(bool),
    String { at: usize, len: usize },
    Array { of: Type, at: usize, count: usize },
}

/// Metadata types, by their numbers in the format.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Type {
    const ALL: [Type; 13] = {
        use Type::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64]
    };

    /// Fewest bytes of a value.
    fn least(self) -> usize {
        match self {
            Type::U8 | Type::I8 | Type::Bool => 1,
            Type::U16 | Type::I16 => 2,
            Type::U32 | Type::I32 | Type::F32 => 4,
            Type::String | Type::U64 | Type::I64 | Type::F64 => 8,
            Type::Array => 12,
        }
    }
}

/// Position and form of a tensor.
struct Tensor {
    kind: Kind,
    /// In the order of the format: the contiguous dimension first.
    dims: Vec<usize>,
    at: usize,
    len: usize,
}

impl Gguf {
    /// Maps a file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
        // SAFETY: a mapping is sound while nobody changes the file. Whoever runs an example has to ensure that, as with every engine that
        // maps its weights.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| format!("{}: {e}", path.display()))?;
        Self::new(Box::new(map)).map_err(|e| format!("{}: {e}", path.display()).into())
    }

    /// Parses the header of a whole file.
    pub fn new(bytes: Box<dyn Deref<Target = [u8]>>) -> Result<Self> {
        let mut reader = Reader { bytes: &bytes, at: 0 };
        let magic = reader.take(4, "magic")?;
        if magic != b"GGUF" {
            return Err(format!("byte 0: begins with {magic:02x?}, a GGUF file with \"GGUF\"").into());
        }
        match reader.u32("version")? {
            2 | 3 => {}
            1 => return Err("byte 4: GGUF version 1; versions 2 and 3 are read".into()),
            v if matches!(v.swap_bytes(), 1..=3) => {
                return Err("byte 4: a big-endian GGUF file; little-endian ones are read".into());
            }
            v => return Err(format!("byte 4: GGUF version {v}; versions 2 and 3 are read").into()),
        }
        // A tensor takes at least 33 bytes of header (name, dimensions, one of them, type, offset), a pair of
        // metadata 13 (name, type, one byte).
        let tensor_count = reader.count(33, "number of tensors")?;
        let pairs = reader.count(13, "number of metadata pairs")?;
        let mut metadata = BTreeMap::new();
        for i in 0..pairs {
            let at = reader.at;
            let name = reader.string(&format!("name of metadata pair {i}"))?.to_owned();
            let of = reader.kind(&name)?;
            let value = reader.value(of, &name)?;
            if metadata.insert(name.clone(), value).is_some() {
                return Err(format!("byte {at}: metadata {name:?} twice").into());
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Unsigned(n)) if n.is_power_of_two() && *n <= 1 << 20 => *n as usize,
            Some(_) => return Err("general.alignment: no power of two up to 1048576".into()),
        };
        let mut list = Vec::new();
        for i in 0..tensor_count {
            list.push(reader.tensor(i)?);
        }
        let data = reader.at.next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, mut tensor, offset) in list {
            let at = usize::try_from(offset).ok().and_then(|offset| data.checked_add(offset));
            let end = at.and_then(|at| at.checked_add(tensor.len));
            tensor.at = match (at, end) {
                (Some(at), Some(end)) if end <= bytes.len() && offset.is_multiple_of(alignment as u64) => at,
                _ => {
                    return Err(format!(
                        "tensor {name:?}: {} bytes at offset {offset} of the data, which has {} bytes, aligned to {alignment}",
                        tensor.len,
                        bytes.len().saturating_sub(data)
                    )
                    .into());
                }
            };
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(format!("tensor {name:?}: twice in the file").into());
            }
        }
        Ok(Self { bytes, metadata, tensors })
    }

    fn value(&self, name: &str) -> Result<&Value> {
        self.metadata.get(name).ok_or_else(|| format!("{name}: not in the file's metadata").into())
    }

    /// Whether metadata has this name.
    pub fn has(&self, name: &str) -> bool {
        self.metadata.contains_key(name)
    }

    /// An integer of any integer type of the format that fits 32 bits.
    pub fn whole(&self, name: &str) -> Result<u32> {
        let value = match self.value(name)? {
            Value::Unsigned(n) => u32::try_from(*n).ok(),
            Value::Signed(n) => u32::try_from(*n).ok(),
            _ => None,
        };
        value.ok_or_else(|| format!("{name}: must be a whole number below 2^32").into())
    }

    pub fn real(&self, name: &str) -> Result<f64> {
        match self.value(name)? {
            Value::Real(x) => Ok(*x),
            _ => Err(format!("{name}: must be a floating-point number").into()),
        }
    }

    pub fn bool(&self, name: &str) -> Result<bool> {
        match self.value(name)? {
            Value::Bool(x) => Ok(*x),
            _ => Err(format!("{name}: must be a bool").into()),
        }
    }

    pub fn string(&self, name: &str) -> Result<&str> {
        match self.value(name)? {
            Value::String { at, len } => Ok(str::from_utf8(&self.bytes[*at..at + len])?),
            _ => Err(format!("{name}: must be a string").into()),
        }
    }

    /// An array of strings.
    pub fn strings(&self, name: &str) -> Result<Vec<&str>> {
        match self.value(name)? {
            Value::Array { of: Type::String, at, count } => {
                let mut reader = Reader { bytes: &self.bytes, at: *at };
                (0..*count).map(|_| reader.string(name)).collect()
            }
            _ => Err(format!("{name}: must be an array of strings").into()),
        }
    }

    /// An array of 32-bit signed integers.
    pub fn integers(&self, name: &str) -> Result<Vec<i32>> {
        match self.value(name)? {
            Value::Array { of: Type::I32, at, count } => {
                let (numbers, _) = self.bytes[*at..at + 4 * count].as_chunks();
                Ok(numbers.iter().map(|n| i32::from_le_bytes(*n)).collect())
            }
            _ => Err(format!("{name}: must be an array of 32-bit integers").into()),
        }
    }

    /// Names of all tensors, sorted.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor's dimensions, the contiguous one first.
    pub fn dims(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| &tensor.dims[..])
    }

    /// Values of a tensor; it must have these dimensions, the contiguous one first.
    pub fn tensor(&self, name: &str, dims: &[usize]) -> Result<Vec<f32>> {
        let (kind, bytes) = self.stored(name, dims)?;
        Ok(kind.to_f32(bytes))
    }

    /// Form and bytes of a tensor; it must have these dimensions, the contiguous one first.
    pub fn stored(&self, name: &str, dims: &[usize]) -> Result<(Kind, &[u8])> {
        let tensor = self.tensors.get(name).ok_or_else(|| format!("tensor {name:?}: not in the file"))?;
        if tensor.dims != dims {
            return Err(format!("tensor {name:?}: dimensions {:?}, must be {dims:?}", tensor.dims).into());
        }
        Ok((tensor.kind, &self.bytes[tensor.at..][..tensor.len]))
    }
}

/// A position in the file.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        if n > self.left() {
            return Err(
                format!("byte {}: {what}: {n} bytes, the file has {} more", self.at, self.left()).into()
            );
        }
        self.at += n;
        Ok(&self.bytes[self.at - n..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a count of items of at least `least` bytes each, and checks that they fit into the bytes left.
    fn count(&mut self, least: usize, what: &str) -> Result<usize> {
        let (at, n) = (self.at, self.u64(what)?);
        match usize::try_from(n) {
            Ok(count) if count <= self.left() / least => Ok(count),
            _ => Err(format!("byte {at}: {what}: {n}, for which {} bytes are too few", self.left()).into()),
        }
    }

    fn string(&mut self, what: &str) -> Result<&'a str> {
        let len = self.count(1, what)?;
        let at = self.at;
        str::from_utf8(self.take(len, what)?).map_err(|e| format!("byte {at}: {what}: {e}").into())
    }

    fn kind(&mut self, what: &str) -> Result<Type> {
        let (at, n) = (self.at, self.u32(what)?);
        let unknown = || format!("byte {at}: {what}: type {n}, the format has 0 to 12").into();
        Type::ALL.get(n as usize).copied().ok_or_else(unknown)
    }

    fn value(&mut self, of: Type, what: &str) -> Result<Value> {
        Ok(match of {
            Type::U8 => Value::Unsigned(self.array::<1>(what)?[0].into()),
            Type::U16 => Value::Unsigned(u16::from_le_bytes(self.array(what)?).into()),
            Type::U32 => Value::Unsigned(self.u32(what)?.into()),
            Type::U64 => Value::Unsigned(self.u64(what)?),
            Type::I8 => Value::Signed(i8::from_le_bytes(self.array(what)?).into()),
            Type::I16 => Value::Signed(i16::from_le_bytes(self.array(what)?).into()),
            Type::I32 => Value::Signed(i32::from_le_bytes(self.array(what)?).into()),
            Type::I64 => Value::Signed(i64::from_le_bytes(self.array(what)?)),
            Type::F32 => Value::Real(f32::from_le_bytes(self.array(what)?).into()),
            Type::F64 => Value::Real(f64::from_le_bytes(self.array(what)?)),
            Type::Bool => match self.array(what)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [x] => return Err(format!("byte {}: {what}: {x}, a bool is 0 or 1", self.at - 1).into()),
            },
            Type::String => {
                let len = self.string(what)?.len();
                Value::String { at: self.at - len, len }
            }
            Type::Array => {
                let of = self.kind(what)?;
                let count = self.count(of.least(), what)?;
                let at = self.at;
                match of {
                    Type::Array => {
                        return Err(format!("byte {at}: {what}: arrays of arrays are not read").into());
                    }
                    Type::String => (0..count).try_for_each(|_| self.string(what).map(drop))?,
                    _ => drop(self.take(count * of.least(), what)?),
                }
                Value::Array { of, at, count }
            }
        })
    }

    /// Name, form and offset of a tensor; its position follows from the end of the header.
    fn tensor(&mut self, i: usize) -> Result<(String, Tensor, u64)> {
        let name = self.string(&format!("name of tensor {i}"))?.to_owned();
        let what = format!("tensor {name:?}");
        let (at, rank) = (self.at, self.u32(&what)?);
        if !(1..=4).contains(&rank) {
            return Err(format!("byte {at}: {what}: {rank} dimensions, must be 1 to 4").into());
        }
        let mut dims = Vec::new();
        for _ in 0..rank {
            dims.push(usize::try_from(self.u64(&what)?)?);
        }
        let (type_at, n) = (self.at, self.u32(&what)?);
        let kind = Kind::new(n).map_err(|e| format!("byte {type_at}: {what}: {e}"))?;
        let offset = self.u64(&what)?;
        let (weights, bytes) = kind.block();
        let elements = dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
        let len = match elements {
            Some(n) if n > 0 && dims[0].is_multiple_of(weights) => (n / weights).checked_mul(bytes),
            _ => None,
        };
        let len = len.ok_or_else(|| {
            format!("byte {at}: {what}: dimensions {dims:?} of {kind:?}, which comes in blocks of {weights}")
        })?;
        Ok((name, Tensor { kind, dims, at: 0, len }, offset))
    }
}
