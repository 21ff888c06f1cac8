//! The linear part of a coding: encodes a row to its stored channels, and decodes it.

use super::MapError;
use pikv_core::codec::pack::Turn;
use pikv_core::codec::read::Back;
use pikv_core::page::MAX_DIM;
use pikv_lanes::product::{dot, product};
use std::borrow::Cow;
use std::sync::Arc;

/// An affine map from a head's row of `wide` channels to the `narrow` channels that are stored:
/// `stored = encode (x - bias)`, `x ~ decode stored + bias`.
///
/// Every method computes in f32, in the order of operations that it documents, so results have the same bits on every machine.
/// Values are not checked: NaN and infinity propagate (the store refuses them earlier). A clone shares the matrices.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::codec::Map;
/// let map = Map::new(3, 1, vec![0.5, 0.5, 0.0], vec![1.0, 1.0, 0.0], None)?;
/// let (mut stored, mut row) = ([0.0], [0.0; 3]);
/// map.encode_row(&[2.0, 4.0, 9.0], &mut stored);
/// map.decode_row(&stored, &mut row);
/// assert_eq!((stored, row), ([3.0], [3.0, 3.0, 0.0]));
/// # Ok::<(), pikv::codec::MapError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    wide: u32,
    narrow: u32,
    form: MapForm,
    bias: Option<Arc<[f32]>>,
}

#[derive(Clone, Debug, PartialEq)]
enum MapForm {
    /// Both matrices, each also transposed: `encode [narrow][wide]`, `decode [wide][narrow]`. Where `decode` is the transpose of
    /// `encode`, as in an orthonormal basis, two allocations hold all four.
    Dense { encode: Arc<[f32]>, encode_t: Arc<[f32]>, decode: Arc<[f32]>, decode_t: Arc<[f32]> },
    /// Stored channel `i` is the row's channel at index `i` of the list.
    Select(Arc<[u32]>),
    /// The Walsh-Hadamard transform, its own inverse.
    Hadamard,
}

impl Map {
    /// A map of `encode`, `[narrow][wide]`, `decode`, `[wide][narrow]`, and a `bias`, `[wide]`. Without a bias, matrices that select
    /// channels or equal [`Map::hadamard`]'s give the same map as [`Map::identity_subset`] or [`Map::hadamard`].
    ///
    /// # Errors
    /// [`MapError::Width`] unless `1 <= narrow <= wide <= 256`, [`MapError::Length`] for a slice of the wrong length,
    /// [`MapError::NotFinite`] for a value that is NaN or infinite.
    pub fn new(
        wide: u32,
        narrow: u32,
        encode: Vec<f32>,
        decode: Vec<f32>,
        bias: Option<Vec<f32>>,
    ) -> Result<Map, MapError> {
        widths(wide, narrow)?;
        let (w, n) = (wide as usize, narrow as usize);
        check("encode", &encode, w * n)?;
        check("decode", &decode, w * n)?;
        if let Some(bias) = &bias {
            check("bias", bias, w)?;
        }
        let (encode_t, decode_t) = (transpose(&encode, w), transpose(&decode, n));
        let form = match special(&encode, w, n).filter(|_| bias.is_none() && encode_t == decode) {
            Some(form) => form,
            None if encode_t == decode => {
                let (down, up): (Arc<[f32]>, Arc<[f32]>) = (encode.into(), decode.into());
                MapForm::Dense { encode: down.clone(), encode_t: up.clone(), decode: up, decode_t: down }
            }
            None => {
                let (encode, decode) = (encode.into(), decode.into());
                MapForm::Dense { encode, encode_t: encode_t.into(), decode, decode_t: decode_t.into() }
            }
        };
        Ok(Map { wide, narrow, form, bias: bias.map(Arc::from) })
    }

    /// Stores the listed `channels` of a row of `wide`, in the given order and unchanged; the others decode to 0.
    ///
    /// # Errors
    /// [`MapError::Width`] for no channels or a `wide` above 256, [`MapError::Channel`] for a channel at or above `wide`, or listed twice.
    pub fn identity_subset(wide: u32, channels: &[u32]) -> Result<Map, MapError> {
        let narrow = u32::try_from(channels.len()).unwrap_or(u32::MAX);
        if let Some((_, &channel)) =
            channels.iter().enumerate().find(|(i, c)| **c >= wide || channels[..*i].contains(c))
        {
            return Err(MapError::Channel { channel, wide });
        }
        widths(wide, narrow)?;
        Ok(Map { wide, narrow, form: MapForm::Select(channels.into()), bias: None })
    }

    /// The orthonormal Walsh-Hadamard transform, in blocks of the largest power of two that divides `wide` (128: one block of 128;
    /// 80: five of 16; odd widths are stored unchanged). It spreads an outlier of one channel over its block.
    ///
    /// The transform is its own inverse and transpose. In a block of `4^k` channels the scale is a power of two, so integers are
    /// restored to the bit as long as the sum of magnitudes of a block stays below 2^24. O(wide log block).
    ///
    /// # Errors
    /// [`MapError::Width`] for a width outside 1..=256.
    pub fn hadamard(wide: u32) -> Result<Map, MapError> {
        widths(wide, wide)?;
        Ok(Map { wide, narrow: wide, form: MapForm::Hadamard, bias: None })
    }

    /// Channels of a row.
    pub fn wide(&self) -> u32 {
        self.wide
    }

    /// Channels that are stored.
    pub fn narrow(&self) -> u32 {
        self.narrow
    }

    /// The matrix from a row to its stored channels, `[narrow][wide]`; allocated by this call for a map without matrices.
    pub fn encode(&self) -> Cow<'_, [f32]> {
        match &self.form {
            MapForm::Dense { encode, .. } => Cow::Borrowed(encode),
            MapForm::Select(channels) => Cow::Owned(selection(channels, self.wide as usize)),
            MapForm::Hadamard => Cow::Owned(hadamard_matrix(self.wide as usize)),
        }
    }

    /// The matrix from stored channels to a row, `[wide][narrow]`; allocated by this call for a map without matrices.
    pub fn decode(&self) -> Cow<'_, [f32]> {
        match &self.form {
            MapForm::Dense { decode, .. } => Cow::Borrowed(decode),
            MapForm::Select(_) => Cow::Owned(transpose(&self.encode(), self.wide as usize)),
            MapForm::Hadamard => self.encode(),
        }
    }

    /// The bias, `[wide]`: subtracted from a row before `encode` and added after `decode`.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// The stored channels of a map that only selects channels, else `None`.
    pub fn channels(&self) -> Option<&[u32]> {
        match &self.form {
            MapForm::Select(channels) => Some(channels),
            _ => None,
        }
    }

    /// Bytes that the map holds; its clones share them.
    pub fn bytes(&self) -> u64 {
        let values = match &self.form {
            MapForm::Dense { encode, encode_t, decode, .. } => {
                if Arc::ptr_eq(encode_t, decode) {
                    2 * encode.len()
                } else {
                    4 * encode.len()
                }
            }
            MapForm::Select(channels) => channels.len(),
            MapForm::Hadamard => 0,
        };
        4 * (values + self.bias.as_ref().map_or(0, |b| b.len())) as u64
    }

    /// Whether the two share what they hold.
    pub(crate) fn is(&self, other: &Map) -> bool {
        match (&self.form, &other.form) {
            (MapForm::Dense { decode: a, .. }, MapForm::Dense { decode: b, .. }) => {
                let bias = (self.bias.as_ref().map(Arc::as_ptr), other.bias.as_ref().map(Arc::as_ptr));
                Arc::ptr_eq(a, b)
                    && bias.0.map(<*const [f32]>::cast::<f32>) == bias.1.map(<*const [f32]>::cast)
            }
            (MapForm::Select(a), MapForm::Select(b)) => Arc::ptr_eq(a, b) && self.wide == other.wide,
            (MapForm::Hadamard, MapForm::Hadamard) => self.wide == other.wide,
            _ => false,
        }
    }

    /// Whether its buffers are not shared with another map.
    pub(crate) fn is_last(&self) -> bool {
        match &self.form {
            MapForm::Dense { decode, encode_t, .. } => {
                Arc::strong_count(decode) == 1 + usize::from(Arc::ptr_eq(decode, encode_t))
            }
            MapForm::Select(channels) => Arc::strong_count(channels) == 1,
            MapForm::Hadamard => true,
        }
    }

    /// Encodes row `x`, `[wide]`, to `out`, `[narrow]`.
    ///
    /// Computes `x[i] - bias[i]` first, where there is a bias; then each output is a chain of fused multiply-adds from 0.0 over the
    /// channels in order. A selection copies. The transform adds and subtracts channels at distance 1, 2, 4, .. and multiplies by
    /// the scale last.
    ///
    /// # Panics
    /// If a slice has another length.
    pub fn encode_row(&self, x: &[f32], out: &mut [f32]) {
        self.lengths(x, out);
        match (&self.form, &self.bias) {
            (MapForm::Dense { encode_t, .. }, None) => product(encode_t, x, out),
            (MapForm::Dense { encode_t, .. }, Some(bias)) => {
                let mut row = [0.0; MAX_DIM as usize];
                let row = &mut row[..x.len()];
                for ((row, x), bias) in row.iter_mut().zip(x).zip(bias.iter()) {
                    *row = x - bias;
                }
                product(encode_t, row, out);
            }
            (MapForm::Select(channels), _) => pick(channels, x, out),
            (MapForm::Hadamard, _) => transform(x, out),
        }
    }

    /// Decodes `stored`, `[narrow]`, to the row `out`, `[wide]`.
    ///
    /// Each output is a chain of fused multiply-adds from 0.0 over the stored channels in order, plus the bias, if there is one, in
    /// one more rounding. A selection copies, and writes 0.0 to the channels that are not stored; the transform is that of
    /// [`Map::encode_row`].
    ///
    /// # Panics
    /// If a slice has another length.
    pub fn decode_row(&self, stored: &[f32], out: &mut [f32]) {
        self.decode_sum(stored, 1.0, out);
    }

    /// [`Map::decode_row`] of a weighted sum of stored rows: the bias is added `weight` times, the sum of the rows' weights.
    pub(crate) fn decode_sum(&self, stored: &[f32], weight: f32, out: &mut [f32]) {
        self.lengths(out, stored);
        match &self.form {
            MapForm::Dense { decode_t, .. } => product(decode_t, stored, out),
            MapForm::Select(channels) => {
                out.fill(0.0);
                for (channel, stored) in channels.iter().zip(stored) {
                    out[*channel as usize] = *stored;
                }
            }
            MapForm::Hadamard => transform(stored, out),
        }
        if let Some(bias) = &self.bias {
            for (out, bias) in out.iter_mut().zip(bias.iter()) {
                *out = bias.mul_add(weight, *out);
            }
        }
    }

    /// The map in the form that lanes encode 32 rows with; same bits as [`Map::encode_row`].
    pub(crate) fn turn(&self) -> Turn<'_> {
        match &self.form {
            MapForm::Dense { encode, .. } => {
                Turn::Dense { encode, bias: self.bias.as_deref().unwrap_or_default() }
            }
            MapForm::Select(channels) => Turn::Select { channels },
            MapForm::Hadamard => Turn::Hadamard { block: block(self.wide as usize) },
        }
    }

    /// The map in the form that lanes decode 32 rows with; same bits as [`Map::decode_row`].
    pub(crate) fn back(&self) -> Back<'_> {
        match &self.form {
            MapForm::Dense { decode, .. } => {
                Back::Dense { decode, bias: self.bias.as_deref().unwrap_or_default() }
            }
            MapForm::Select(channels) => Back::Select { channels },
            MapForm::Hadamard => Back::Hadamard { block: block(self.wide as usize) },
        }
    }

    /// Writes `decode^T q` to `out`, `[narrow]`, so that `q . x` is `out . stored` [plus](Map::bias_dot) `q . bias`: attention over
    /// stored rows at the narrow width. The order of operations is that of [`Map::encode_row`] without a bias.
    ///
    /// For keys that are rotated on read this holds only where the map selects whole rotation pairs. For other maps the rotation lies
    /// between `decode` and `q`, so a row is decoded before it is rotated.
    ///
    /// # Panics
    /// If a slice has another length.
    pub fn fold(&self, q: &[f32], out: &mut [f32]) {
        self.lengths(q, out);
        match &self.form {
            MapForm::Dense { decode, .. } => product(decode, q, out),
            MapForm::Select(channels) => pick(channels, q, out),
            MapForm::Hadamard => transform(q, out),
        }
    }

    /// `q . bias`, a chain of fused multiply-adds from 0.0; 0 without a bias.
    ///
    /// # Panics
    /// If the length of `q` is not `wide`.
    pub fn bias_dot(&self, q: &[f32]) -> f32 {
        assert_eq!(q.len(), self.wide as usize, "a query has as many channels as the map is wide");
        self.bias.as_ref().map_or(0.0, |bias| dot(q, bias))
    }

    /// A bound on magnitude: if every channel of a row is within it, no stored channel passes `top`, rounding included. 0 if the bias
    /// alone may pass `top`, [`f32::MAX`] if no row can.
    pub fn limit(&self, top: f32) -> f32 {
        if top.is_nan() || top <= 0.0 {
            return 0.0;
        }
        match &self.form {
            MapForm::Select(_) => top.min(f32::MAX),
            MapForm::Hadamard => {
                let block = block(self.wide as usize);
                floor(f64::from(top) * slack(block.ilog2() as usize + 2) / (block as f64).sqrt())
            }
            MapForm::Dense { encode, .. } => {
                let wide = self.wide as usize;
                let top = f64::from(top) * slack(wide + 2);
                let row = |row: &[f32]| {
                    let sum: f64 = row.iter().map(|e| f64::from(e.abs())).sum();
                    let taken = self.taken(row);
                    // A subnormal result has an absolute rounding error, not a relative one: leave room for it.
                    if sum == 0.0 { f64::MAX } else { (top - taken - wide as f64 * 1e-44) / sum }
                };
                floor(encode.chunks_exact(wide).map(row).fold(f64::MAX, f64::min))
            }
        }
    }

    /// A bound on length (2-norm), with the number of channels in the runs that it applies to: if each run of a row is within it, no
    /// stored channel passes `top`, rounding included. 0 if the bias alone may pass `top`. Unlike [`Map::limit`] it admits rows with
    /// a few large channels. `None` for maps that store each channel by itself.
    pub(crate) fn length(&self, top: f32) -> Option<(usize, f64)> {
        match &self.form {
            MapForm::Select(_) => None,
            MapForm::Hadamard => {
                let block = block(self.wide as usize);
                Some((block, f64::from(top) * slack(block.ilog2() as usize + 2)))
            }
            MapForm::Dense { encode, .. } => {
                let wide = self.wide as usize;
                let top = f64::from(top) * slack(wide + 2);
                let row = |row: &[f32]| {
                    let norm = length(row.iter().copied());
                    let taken = self.taken(row);
                    if norm == 0.0 { f64::MAX } else { (top - taken - wide as f64 * 1e-44) / norm }
                };
                Some((wide, encode.chunks_exact(wide).map(row).fold(f64::MAX, f64::min).max(0.0)))
            }
        }
    }

    /// The most that the bias can add to the stored channel of `row` of the matrix.
    fn taken(&self, row: &[f32]) -> f64 {
        let bias = self.bias.iter().flat_map(|b| b.iter());
        row.iter().zip(bias).map(|(e, b)| (f64::from(*e) * f64::from(*b)).abs()).sum()
    }

    fn lengths(&self, wide: &[f32], narrow: &[f32]) {
        assert_eq!(
            (wide.len(), narrow.len()),
            (self.wide as usize, self.narrow as usize),
            "a row and what is stored for it have as many channels as the map says"
        );
    }
}

fn widths(wide: u32, narrow: u32) -> Result<(), MapError> {
    let ok = (1..=MAX_DIM).contains(&wide) && (1..=wide).contains(&narrow);
    if ok { Ok(()) } else { Err(MapError::Width { wide, narrow }) }
}

fn check(what: &'static str, values: &[f32], wanted: usize) -> Result<(), MapError> {
    if values.len() != wanted {
        return Err(MapError::Length { what, len: values.len(), wanted });
    }
    match values.iter().position(|x| !x.is_finite()) {
        Some(index) => Err(MapError::NotFinite { what, index, value: values[index] }),
        None => Ok(()),
    }
}

/// The transpose of `matrix`, which has rows of `width`.
fn transpose(matrix: &[f32], width: usize) -> Vec<f32> {
    (0..width).flat_map(|c| matrix.iter().skip(c).step_by(width).copied()).collect()
}

/// The equivalent form without matrices, if `encode` and its transpose have one.
fn special(encode: &[f32], wide: usize, narrow: usize) -> Option<MapForm> {
    let ones = encode.chunks_exact(wide).map(|row| row.iter().position(|x| *x == 1.0));
    if let Some(channels) = ones.collect::<Option<Vec<usize>>>() {
        let channels: Vec<u32> = channels.into_iter().map(|c| c as u32).collect();
        if encode == selection(&channels, wide)
            && (1..channels.len()).all(|i| !channels[..i].contains(&channels[i]))
        {
            return Some(MapForm::Select(channels.into()));
        }
    }
    (wide == narrow && encode == hadamard_matrix(wide)).then_some(MapForm::Hadamard)
}

fn selection(channels: &[u32], wide: usize) -> Vec<f32> {
    let mut matrix = vec![0.0; channels.len() * wide];
    for (row, channel) in matrix.chunks_exact_mut(wide).zip(channels) {
        row[*channel as usize] = 1.0;
    }
    matrix
}

fn pick(channels: &[u32], x: &[f32], out: &mut [f32]) {
    for (out, channel) in out.iter_mut().zip(channels) {
        *out = x[*channel as usize];
    }
}

/// The largest power of two that divides `wide`.
fn block(wide: usize) -> usize {
    1 << wide.trailing_zeros()
}

fn transform(x: &[f32], out: &mut [f32]) {
    out.copy_from_slice(x);
    let block = block(out.len());
    let scale = (1.0 / block as f32).sqrt();
    for part in out.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block {
            for pair in part.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        for x in part {
            *x *= scale;
        }
    }
}

fn hadamard_matrix(wide: usize) -> Vec<f32> {
    let mut matrix = vec![0.0; wide * wide];
    let mut unit = [0.0; MAX_DIM as usize];
    for (c, row) in matrix.chunks_exact_mut(wide).enumerate() {
        unit[c] = 1.0;
        transform(&unit[..wide], row);
        unit[c] = 0.0;
    }
    matrix
}

/// The 2-norm, in f64, summed in order.
pub(super) fn length(x: impl Iterator<Item = f32>) -> f64 {
    x.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// The factor that a bound keeps after at most `roundings` roundings in a row.
fn slack(roundings: usize) -> f64 {
    1.0 - roundings as f64 * f64::from(f32::EPSILON)
}

/// The largest f32 that is not above `x`; 0 for negative `x`.
fn floor(x: f64) -> f32 {
    let y = x.clamp(0.0, f64::from(f32::MAX)) as f32;
    if f64::from(y) > x.max(0.0) { y.next_down() } else { y }
}
