//! How a head's tokens are packed once they left the ring.

use super::map::{Map, length};
use super::{MapError, c_ch_lit, c_py_lit};
use crate::base::error::ConfigError;
use pikv_core::codec::code::{Code, Scale};
use pikv_core::codec::pack::{Turn, pack_tables};
use pikv_core::codec::packed::{Packed, Side};
use pikv_core::codec::read::Back;
use pikv_core::page::{Layout, MAX_DIM, Position, Unstorable};
use pikv_core::warp::LANES;
use pikv_lanes::{Lanes, pack::Channels};
use std::cell::RefCell;

/// How K or V is stored in packed pages: a code, of the channels themselves or of what a map makes of them, of means, or of
/// coefficients.
#[derive(Clone, Debug)]
pub struct Coding {
    code: Code,
    form: Form,
}

#[derive(Clone, Debug)]
enum Form {
    Plain,
    Map(Map),
    /// Of a level.
    Means(u32),
    /// Of a rank.
    Basis(u32),
}

impl Coding {
    /// The channels as they are, in `code`.
    pub const fn new(code: Code) -> Coding {
        Coding { code, form: Form::Plain }
    }

    /// What `map` makes of a row is coded instead.
    pub fn map(mut self, map: Map) -> Coding {
        self.form = Form::Map(map);
        self
    }

    /// C_Py-lit: runs of `2^level` tokens of a page, in the order in which they were filed, are stored as their mean, in `code`, and
    /// every token of a run is read as that: `1 / 2^level` of the bytes. A token that was evicted or has left a window is read no
    /// more, but stays in its run's mean.
    ///
    /// # Errors
    /// A level that is not 1..=3, or a code with scales.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::codec::{Code, Codec, Coding};
    /// let quarter = Coding::means(Code::Bf16, 2)?;
    /// let page = Codec::new(quarter.clone(), quarter).packed(128, 128);
    /// assert_eq!(page.bytes(), 2 * 8 * 128 * 2 + 64);
    /// # Ok::<(), pikv::codec::MapError>(())
    /// ```
    pub fn means(code: Code, level: u32) -> Result<Coding, MapError> {
        if !(1..=3).contains(&level) {
            return Err(MapError::Level { level });
        }
        if code.scale() != Scale::None {
            return Err(MapError::Scaled { code: code.name() });
        }
        Ok(Coding { code, form: Form::Means(level) })
    }

    /// C_Ch-lit: each page as coefficients, in `code`, in a basis of its own of `rank` vectors around its own mean, both in f16 and in
    /// the page. K's basis is stored with a power of two of vectors, the mean among them, so 3, 7 and 15 waste nothing. Packing
    /// takes O(32^3 + 32^2 head_dim) a page.
    ///
    /// # Errors
    /// A rank that is not 1..=31.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::codec::{Code, Codec, Coding};
    /// let seven = Coding::block_pca(Code::F16, 7)?;
    /// let page = Codec::new(seven, Coding::new(Code::Bf16)).packed(128, 128);
    /// // 4 words of coefficients for 32 keys, 8 vectors of 64 words, values as they are.
    /// assert_eq!(page.bytes(), 4 * (4 * 32 + 8 * 64) + 32 * 128 * 2 + 64);
    /// # Ok::<(), pikv::codec::MapError>(())
    /// ```
    pub fn block_pca(code: Code, rank: u32) -> Result<Coding, MapError> {
        if !(1..=31).contains(&rank) {
            return Err(MapError::Rank { rank });
        }
        Ok(Coding { code, form: Form::Basis(rank) })
    }

    /// The code.
    pub const fn code(&self) -> Code {
        self.code
    }

    /// The map, if there is one.
    pub const fn mapped(&self) -> Option<&Map> {
        match &self.form {
            Form::Map(map) => Some(map),
            _ => None,
        }
    }

    /// The level of the means that are stored, if they are.
    pub const fn level(&self) -> Option<u32> {
        match self.form {
            Form::Means(level) => Some(level),
            _ => None,
        }
    }

    /// The vectors of a page's own basis, if it has one.
    pub const fn rank(&self) -> Option<u32> {
        match self.form {
            Form::Basis(rank) => Some(rank),
            _ => None,
        }
    }

    /// Stored channels of a row of `dim`.
    pub fn stored(&self, dim: u32) -> u32 {
        match &self.form {
            Form::Plain | Form::Means(_) => dim,
            Form::Map(map) => map.narrow(),
            Form::Basis(rank) => *rank,
        }
    }

    fn side(&self, dim: u32) -> Side {
        match self.form {
            Form::Plain | Form::Map(_) => Side::Tokens,
            Form::Means(level) => Side::Means { level },
            Form::Basis(_) => Side::Basis { wide: dim },
        }
    }

    /// The largest magnitude of a channel that this can store whatever the width of the row and its other channels, with a hundredth of
    /// room for the roundings of the head's dtype and of the map: [`Coding::limits`] of the widest rows.
    pub fn limit(&self) -> f32 {
        self.limits(MAX_DIM).each
    }

    /// Which rows of `dim` channels this can store, with a hundredth of room for the roundings of the head's dtype and of the map.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::codec::{Code, Coding, Map};
    /// let spread = Coding::new(Code::Int8).map(Map::hadamard(128)?).limits(128);
    /// // All 128 channels may be 5,700; one of 60,000 will do too.
    /// assert!(spread.take(&[5_700.0; 128]) && !spread.take(&[6_000.0; 128]));
    /// let mut row = [0.0; 128];
    /// row[37] = 60_000.0;
    /// assert!(spread.take(&row));
    /// # Ok::<(), pikv::codec::MapError>(())
    /// ```
    pub fn limits(&self, dim: u32) -> Limits {
        let top = 0.99 * self.code.limit();
        let alike = |each| Limits { each, most: each, run: dim as usize, length: f64::INFINITY };
        match &self.form {
            Form::Plain | Form::Means(_) => alike(top),
            Form::Map(map) => match map.length(top) {
                None => alike(map.limit(top)),
                Some((run, length)) => Limits { each: map.limit(top), most: f32::MAX, run, length },
            },
            Form::Basis(_) => {
                // A mean is an f16; a coefficient is no longer than a row from its mean, which is less than twice the longest row.
                let (mean, length) = (0.99 * Code::F16.limit(), f64::from(top) / 2.0);
                let each = (length / f64::from(dim).sqrt()) as f32;
                Limits { each: mean.min(each), most: mean, run: dim as usize, length }
            }
        }
    }
}

/// Which rows a [`Coding`] can store: those with no channel past `each`, and those with no channel past `most` in which no run of
/// `run` channels is longer than `length`.
///
/// Keys and values that lie on a device when they are appended are judged by `each` alone.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Magnitude that all channels of a row may have at once.
    pub each: f32,
    /// Magnitude that no channel may pass.
    pub most: f32,
    /// Channels whose length counts together.
    pub run: usize,
    /// The root of the sum of the squares of a run that has a channel past `each`; infinite where lengths do not matter.
    pub length: f64,
}

impl Limits {
    /// Whether the row can be stored. Of NaN this says nothing: the dtype refuses it.
    pub fn take(&self, row: &[f32]) -> bool {
        self.check(row).is_ok()
    }

    /// # Errors
    /// The first channel that is too large, or the largest of the first run that is too long.
    #[inline]
    fn check(&self, row: &[f32]) -> Result<(), Past> {
        if row.iter().all(|x| x.abs() <= self.each) { Ok(()) } else { self.check_large(row) }
    }

    /// [`Limits::check`] of a row with a channel past `each`.
    #[cold]
    fn check_large(&self, row: &[f32]) -> Result<(), Past> {
        if let Some(channel) = row.iter().position(|x| x.abs() > self.most) {
            return Err(Past { channel, length: None, limit: self.most });
        }
        for (i, run) in row.chunks(self.run).enumerate() {
            let length = length(run.iter().copied());
            if length > self.length {
                let larger = |a: &usize, b: &usize| run[*a].abs().total_cmp(&run[*b].abs());
                let channel = i * self.run + (0..run.len()).max_by(larger).unwrap_or(0);
                return Err(Past { channel, length: Some(length as f32), limit: self.length as f32 });
            }
        }
        Ok(())
    }

    /// The rows that both take, of which the second gets what the first left: that may be longer than the row was, so lengths do not
    /// help.
    fn and_then(self, second: Limits) -> Limits {
        let each = self.each.min(second.each);
        Limits { each, most: each, run: self.run, length: f64::INFINITY }
    }
}

/// The channel, or run of channels, that makes a row too large to store.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Past {
    channel: usize,
    /// Of the run, if it is that which is too much.
    length: Option<f32>,
    limit: f32,
}

/// Why a token cannot be packed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Unpackable {
    pub which: Unstorable,
    /// Of the channels around it, if it is that which is too much.
    pub length: Option<f32>,
    /// The largest value, or length, that would do.
    pub limit: f32,
}

/// How a head's tokens are packed, 32 at a time, once they left the ring: K and V apart.
///
/// Sinks, the ring, and an expert's last page until it is full stay as they came.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::codec::{Code, Codec, Coding, Map};
/// // 4 bits, keys turned by a Hadamard transform first.
/// let codec = Codec::new(Coding::new(Code::Int4).map(Map::hadamard(128)?), Coding::new(Code::Int4));
/// let page = codec.packed(128, 128);
/// // 4.5 bits a channel of K (a scale and a minimum for 32 tokens), 5 of V (for 32 channels), and the positions.
/// assert_eq!(page.bytes(), 32 * 128 / 2 * 2 + 128 * 4 + 32 * 4 * 4 + 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Codec {
    /// Keys.
    pub k: Coding,
    /// Values.
    pub v: Coding,
}

impl Codec {
    /// K and V, each its own way.
    pub const fn new(k: Coding, v: Coding) -> Codec {
        Codec { k, v }
    }

    /// The layout of packed pages of a head with these widths.
    pub fn packed(&self, k_dim: u32, v_dim: u32) -> Packed {
        Packed::new(self.k.stored(k_dim), self.v.stored(v_dim), self.k.code, self.v.code)
            .sides(self.k.side(k_dim), self.v.side(v_dim))
    }

    /// Raw bytes in bf16 over packed bytes, scales and positions included: the paper's rho.
    pub fn ratio(&self, k_dim: u32, v_dim: u32) -> f64 {
        let raw = LANES as u64 * 2 * u64::from(k_dim + v_dim);
        raw as f64 / self.packed(k_dim, v_dim).bytes() as f64
    }
}

/// The codec of one head, checked, with what follows from it.
#[derive(Clone, Debug)]
pub(crate) struct HeadCodec {
    pub codec: Codec,
    pub packed: Packed,
    pub k_limits: Limits,
    pub v_limits: Limits,
    /// How its pages are packed once more.
    pub aged: Option<Box<Aged>>,
}

/// The second codec of a head.
#[derive(Clone, Debug)]
pub(crate) struct Aged {
    /// Tokens that leave the ring between the two.
    pub after: u32,
    pub codec: HeadCodec,
}

impl HeadCodec {
    /// # Errors
    /// A map of another width than the head's.
    pub fn new(layer: usize, layout: &Layout, codec: &Codec) -> Result<HeadCodec, ConfigError> {
        let widths = [("k", &codec.k, layout.k_dim), ("v", &codec.v, layout.v_dim)];
        for (what, coding, dim) in widths {
            if let Some(wide) = coding.mapped().map(Map::wide).filter(|wide| *wide != dim) {
                return Err(ConfigError::Map { layer, what, wide, dim });
            }
        }
        Ok(HeadCodec {
            packed: codec.packed(layout.k_dim, layout.v_dim),
            k_limits: codec.k.limits(layout.k_dim),
            v_limits: codec.v.limits(layout.v_dim),
            codec: codec.clone(),
            aged: None,
        })
    }

    /// Packs pages once more when `after` more tokens have left the ring.
    pub fn age(&mut self, after: u32, codec: HeadCodec) {
        self.k_limits = self.k_limits.and_then(codec.k_limits);
        self.v_limits = self.v_limits.and_then(codec.v_limits);
        self.aged = Some(Box::new(Aged { after, codec }));
    }

    /// Whether means stand for single tokens, in pages of whatever age.
    pub fn has_means(&self) -> bool {
        let old = self.aged.as_ref().is_some_and(|aged| aged.codec.has_means());
        old || [&self.codec.k, &self.codec.v].into_iter().any(|coding| coding.level().is_some())
    }

    /// The position from which on rows read the page that `by` packed as the second codec left it; none without one.
    pub fn ages_at(&self, by: u32) -> Option<u32> {
        Some(by.saturating_add(self.aged.as_ref()?.after))
    }

    /// Whether a token can be stored, however its dtype rounds it.
    ///
    /// # Errors
    /// The channel of the key, else of the value, that is too large.
    pub fn check(&self, key: &[f32], value: &[f32]) -> Result<(), Unpackable> {
        for (key, limits, row) in [(true, &self.k_limits, key), (false, &self.v_limits, value)] {
            limits.check(row).map_err(|Past { channel, length, limit }| {
                let which = Unstorable { key, channel: channel as u32, value: row[channel] };
                Unpackable { which, length, limit }
            })?;
        }
        Ok(())
    }

    /// Packs the first `fill` tokens of `page`.
    pub fn pack(&self, lanes: Lanes, layout: &Layout, page: &[u32], fill: u32, out: &mut [u32]) {
        let positions = &page[..fill as usize];
        ROWS.with_borrow_mut(|rows| {
            self.clear(layout, rows);
            let (k, rest) = rows.split_at_mut(layout.k_dim as usize);
            pikv_lanes::pack::unpack(lanes, layout, page, fill, k, &mut rest[..layout.v_dim as usize]);
            self.close(lanes, layout, positions, rows, out);
        });
    }

    /// Packs the tokens of a page that this packed by the second codec, if there is one.
    pub fn repack(&self, lanes: Lanes, layout: &Layout, page: Old<'_>, out: &mut [u32]) {
        let Some(second) = self.aged.as_ref().map(|aged| &aged.codec) else { return };
        let Old { words, fill, last } = page;
        let positions: Vec<u32> = (0..fill).map(|lane| self.packed.position(words, lane, last).0).collect();
        let (mut key, mut value) = (vec![0.0; layout.k_dim as usize], vec![0.0; layout.v_dim as usize]);
        ROWS.with_borrow_mut(|rows| {
            second.clear(layout, rows);
            for lane in 0..LANES {
                self.read(words, (lane as u32).min(fill - 1), last, &mut key, &mut value);
                rows.iter_mut().zip(key.iter().chain(&value)).for_each(|(row, x)| row[lane] = *x);
            }
            second.close(lanes, layout, &positions, rows, out);
        });
    }

    /// Packs the tokens at `positions`. `rows` are their channels of K, of V, and room for those that are stored.
    fn close(
        &self,
        lanes: Lanes,
        layout: &Layout,
        positions: &[u32],
        rows: &mut [[f32; LANES]],
        out: &mut [u32],
    ) {
        let fill = positions.len() as u32;
        let (k, rest) = rows.split_at_mut(layout.k_dim as usize);
        let (v, rest) = rest.split_at_mut(layout.v_dim as usize);
        let (k_stored, v_stored) = rest.split_at_mut(self.packed.k_dim as usize);
        let (k_table, v_table) = (table(&self.codec.k, k, fill), table(&self.codec.v, v, fill));
        let k = mapped(&self.codec.k, &k_table, k, k_stored);
        let v = mapped(&self.codec.v, &v_table, v, v_stored);
        pikv_lanes::pack::pack(lanes, &self.packed, positions, k, v, out);
        if self.packed.factored() {
            pack_tables(&self.packed, &k_table, &v_table, out);
        }
    }

    /// Takes stored keys back to the head's channels; none where they are stored as they are.
    pub fn back(&self) -> Option<Back<'_>> {
        self.codec.k.mapped().map(Map::back)
    }

    fn clear(&self, layout: &Layout, rows: &mut Vec<[f32; LANES]>) {
        let all = layout.k_dim + layout.v_dim + self.packed.k_dim + self.packed.v_dim;
        rows.clear();
        rows.resize(all as usize, [0.0; LANES]);
    }

    /// What is left of query `q`, times `factor`, in `out`; returns what its scores start from.
    pub fn fold(&self, q: &[f32], factor: f32, out: &mut [f32]) -> f32 {
        let out = &mut out[..self.packed.query_dim() as usize];
        let start = match self.codec.k.mapped() {
            None => {
                out.copy_from_slice(q);
                0.0
            }
            Some(map) => {
                map.fold(q, out);
                map.bias_dot(q)
            }
        };
        out.iter_mut().for_each(|x| *x *= factor);
        start * factor
    }

    /// Key and value of the token at `lane`, decoded to the head's channels.
    pub fn read(&self, words: &[u32], lane: u32, last: u32, key: &mut [f32], value: &mut [f32]) -> Position {
        fn whole(coding: &Coding, out: &mut [f32], read: impl FnOnce(&mut [f32])) {
            match coding.mapped() {
                None => read(out),
                Some(map) => {
                    let mut stored = vec![0.0; map.narrow() as usize];
                    read(&mut stored);
                    map.decode_row(&stored, out);
                }
            }
        }
        whole(&self.codec.k, key, |key| self.packed.read_key(words, lane, key));
        whole(&self.codec.v, value, |value| self.packed.read_value(words, lane, value));
        self.packed.position(words, lane, last)
    }
}

thread_local! {
    /// Channel rows of a page that is being packed.
    static ROWS: RefCell<Vec<[f32; LANES]>> = const { RefCell::new(Vec::new()) };
}

/// A packed page that is packed again.
#[derive(Clone, Copy)]
pub(crate) struct Old<'a> {
    pub words: &'a [u32],
    pub fill: u32,
    pub last: u32,
}

/// The rows beside a page's tokens, `[rows][channels]`: means, or a basis and its mean. None for other codings.
fn table(coding: &Coding, x: &[[f32; LANES]], fill: u32) -> Vec<f32> {
    let rows = || -> Vec<f32> { (0..fill as usize).flat_map(|t| x.iter().map(move |row| row[t])).collect() };
    match coding.form {
        Form::Plain | Form::Map(_) => Vec::new(),
        Form::Means(level) => c_py_lit::means(&rows(), x.len(), 1 << level, |_, _| ()),
        Form::Basis(rank) => {
            let found = c_ch_lit::basis(&rows(), x.len(), rank as usize);
            [found.basis, found.mean].concat()
        }
    }
}

/// What becomes of the channels `x` before they are coded; `out` has room for it.
fn mapped<'a>(
    coding: &'a Coding,
    table: &'a [f32],
    x: &'a mut [[f32; LANES]],
    out: &'a mut [[f32; LANES]],
) -> Channels<'a> {
    let turn = match &coding.form {
        Form::Plain | Form::Means(_) => return Channels { rows: x, map: None },
        Form::Map(map) => map.turn(),
        Form::Basis(rank) => {
            let (encode, bias) = table.split_at(*rank as usize * x.len());
            Turn::Dense { encode, bias }
        }
    };
    Channels { rows: x, map: Some((turn, out)) }
}
