//! The packed form of a head's tokens that left the ring.

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

/// How K or V is stored in packed pages: a code (number format) for the channels themselves, for the output of a map, for means of
/// tokens, or for coefficients in a basis of the page.
#[derive(Clone, Debug)]
pub struct Coding {
    code: Code,
    form: StoredForm,
}

#[derive(Clone, Debug)]
enum StoredForm {
    Plain,
    Map(Map),
    /// Means of runs of `2^level` tokens.
    Means(u32),
    /// A basis of that many vectors for each page.
    Basis(u32),
}

impl Coding {
    /// Stores the channels unchanged, in `code`.
    pub const fn new(code: Code) -> Coding {
        Coding { code, form: StoredForm::Plain }
    }

    /// Stores the output of `map` instead of the channels.
    pub fn map(mut self, map: Map) -> Coding {
        self.form = StoredForm::Map(map);
        self
    }

    /// C_Py-lit: stores runs of `2^level` tokens of a page, in filing order, as their mean in `code`; every token of a run is read as
    /// that mean. Takes `1 / 2^level` of the bytes. A token that was evicted or left a window is not read, but still counts in the
    /// mean of its run.
    ///
    /// # Errors
    /// [`MapError::Level`] for a level outside 1..=3, [`MapError::Scaled`] for a code with scales.
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
        Ok(Coding { code, form: StoredForm::Means(level) })
    }

    /// C_Ch-lit: stores each page as coefficients, in `code`, in a basis of `rank` vectors around the page's mean; basis and mean are
    /// f16 and lie in the page. The vectors of K's basis and the mean together are padded to a power of two, so ranks 3, 7 and 15
    /// waste nothing. Packing takes O(32^3 + 32^2 head_dim) a page.
    ///
    /// # Errors
    /// [`MapError::Rank`] for a rank outside 1..=31.
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
        Ok(Coding { code, form: StoredForm::Basis(rank) })
    }

    /// The number format.
    pub const fn code(&self) -> Code {
        self.code
    }

    /// The map, or `None` for a coding without one.
    pub const fn mapped(&self) -> Option<&Map> {
        match &self.form {
            StoredForm::Map(map) => Some(map),
            _ => None,
        }
    }

    /// The level of [`Coding::means`], or `None` for other codings.
    pub const fn level(&self) -> Option<u32> {
        match self.form {
            StoredForm::Means(level) => Some(level),
            _ => None,
        }
    }

    /// The rank of [`Coding::block_pca`], or `None` for other codings.
    pub const fn rank(&self) -> Option<u32> {
        match self.form {
            StoredForm::Basis(rank) => Some(rank),
            _ => None,
        }
    }

    /// Stored channels for a row of `dim` channels.
    pub fn stored(&self, dim: u32) -> u32 {
        match &self.form {
            StoredForm::Plain | StoredForm::Means(_) => dim,
            StoredForm::Map(map) => map.narrow(),
            StoredForm::Basis(rank) => *rank,
        }
    }

    fn side(&self, dim: u32) -> Side {
        match self.form {
            StoredForm::Plain | StoredForm::Map(_) => Side::Tokens,
            StoredForm::Means(level) => Side::Means { level },
            StoredForm::Basis(_) => Side::Basis { wide: dim },
        }
    }

    /// The largest magnitude that every channel of any row may have at once, with 1 % of room for the roundings of the head's dtype and
    /// of the map: [`Coding::limits`] at the largest head_dim.
    pub fn limit(&self) -> f32 {
        self.limits(MAX_DIM).each
    }

    /// Limits of rows of `dim` channels, with 1 % of room for the roundings of the head's dtype and of the map.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::codec::{Code, Coding, Map};
    /// let spread = Coding::new(Code::Int8).map(Map::hadamard(128)?).limits(128);
    /// // All 128 channels may be 5,700; one of 60,000 will do too.
    /// assert!(spread.accepts(&[5_700.0; 128]) && !spread.accepts(&[6_000.0; 128]));
    /// let mut row = [0.0; 128];
    /// row[37] = 60_000.0;
    /// assert!(spread.accepts(&row));
    /// # Ok::<(), pikv::codec::MapError>(())
    /// ```
    pub fn limits(&self, dim: u32) -> Limits {
        let top = 0.99 * self.code.limit();
        let alike = |each| Limits { each, most: each, run: dim as usize, length: f64::INFINITY };
        match &self.form {
            StoredForm::Plain | StoredForm::Means(_) => alike(top),
            StoredForm::Map(map) => match map.length(top) {
                None => alike(map.limit(top)),
                Some((run, length)) => Limits { each: map.limit(top), most: f32::MAX, run, length },
            },
            StoredForm::Basis(_) => {
                // A mean is an f16. A coefficient is at most the row's distance from the mean, which is below twice the longest row.
                let (mean, length) = (0.99 * Code::F16.limit(), f64::from(top) / 2.0);
                let each = (length / f64::from(dim).sqrt()) as f32;
                Limits { each: mean.min(each), most: mean, run: dim as usize, length }
            }
        }
    }
}

/// Limits of the rows that a [`Coding`] can store. A row is accepted if no channel passes `each`, or if no channel passes `most` and
/// no run of `run` channels is longer than `length`.
///
/// Keys and values appended from device memory are checked against `each` alone.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Magnitude that all channels of a row may have at once.
    pub each: f32,
    /// Magnitude that no channel may pass.
    pub most: f32,
    /// Channels of a run.
    pub run: usize,
    /// Largest 2-norm of a run in a row with a channel past `each`; infinite if lengths are not checked.
    pub length: f64,
}

impl Limits {
    /// Whether the row is within the limits. NaN is not detected; the dtype's check refuses it.
    pub fn accepts(&self, row: &[f32]) -> bool {
        self.check(row).is_ok()
    }

    /// # Errors
    /// The first channel past `most`, or the largest channel of the first run that is too long.
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

    /// The limits of rows that are stored by `self` and then by `second`. `second` packs decoded rows, which may be longer than the
    /// originals, so length limits do not apply.
    fn and_then(self, second: Limits) -> Limits {
        let each = self.each.min(second.each);
        Limits { each, most: each, run: self.run, length: f64::INFINITY }
    }
}

/// The channel, or run of channels, that makes a row too large to store.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Past {
    channel: usize,
    /// 2-norm of the run, if the run is too long rather than a channel too large.
    length: Option<f32>,
    limit: f32,
}

/// A token that cannot be packed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Unpackable {
    pub which: Unstorable,
    /// 2-norm of the run around the channel, if the run is too long.
    pub length: Option<f32>,
    /// The largest accepted value, or length.
    pub limit: f32,
}

/// The codings of a head's K and V. Tokens that left the ring are packed 32 at a time.
///
/// Sinks, the ring, and an expert's last page until it is full keep the head's dtype.
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
    /// K by `k`, V by `v`.
    pub const fn new(k: Coding, v: Coding) -> Codec {
        Codec { k, v }
    }

    /// The layout of packed pages of a head with these widths.
    pub fn packed(&self, k_dim: u32, v_dim: u32) -> Packed {
        Packed::new(self.k.stored(k_dim), self.v.stored(v_dim), self.k.code, self.v.code)
            .sides(self.k.side(k_dim), self.v.side(v_dim))
    }

    /// Bytes of a page in bf16 over bytes packed, scales and positions included: the paper's rho.
    pub fn ratio(&self, k_dim: u32, v_dim: u32) -> f64 {
        let raw = LANES as u64 * 2 * u64::from(k_dim + v_dim);
        raw as f64 / self.packed(k_dim, v_dim).bytes() as f64
    }
}

/// The checked codec of one head, with its derived layout and limits.
#[derive(Clone, Debug)]
pub(crate) struct HeadCodec {
    pub codec: Codec,
    pub packed: Packed,
    pub k_limits: Limits,
    pub v_limits: Limits,
    /// The second codec, which packs old pages again.
    pub aged: Option<Box<Aged>>,
}

/// The second codec of a head.
#[derive(Clone, Debug)]
pub(crate) struct Aged {
    /// Tokens that leave the ring between the first packing and the second.
    pub after: u32,
    pub codec: HeadCodec,
}

impl HeadCodec {
    /// The codec of a head with pages of `layout`.
    ///
    /// # Errors
    /// [`ConfigError::Map`] for a map whose `wide` is not the head's K or V width.
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

    /// Sets the second codec: a page is packed again when `after` more tokens have left the ring.
    pub fn age(&mut self, after: u32, codec: HeadCodec) {
        self.k_limits = self.k_limits.and_then(codec.k_limits);
        self.v_limits = self.v_limits.and_then(codec.v_limits);
        self.aged = Some(Box::new(Aged { after, codec }));
    }

    /// Whether this codec or the second one stores means in place of tokens.
    pub fn has_means(&self) -> bool {
        let old = self.aged.as_ref().is_some_and(|aged| aged.codec.has_means());
        old || [&self.codec.k, &self.codec.v].into_iter().any(|coding| coding.level().is_some())
    }

    /// The position from which rows read the page in the second codec's form, for a page packed at `by`; `None` without a second codec.
    pub fn ages_at(&self, by: u32) -> Option<u32> {
        Some(by.saturating_add(self.aged.as_ref()?.after))
    }

    /// Whether a token can be stored, including the rounding of its dtype.
    ///
    /// # Errors
    /// The first channel that is too large, of the key, else of the value.
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

    /// Packs a page of this codec again by the second codec; does nothing without one.
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

    /// Packs the tokens at `positions`. `rows` are their channels of K and of V, then room for the stored channels.
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

    /// The map that decodes stored keys to the head's channels; `None` for keys stored without a map.
    pub fn back(&self) -> Option<Back<'_>> {
        self.codec.k.mapped().map(Map::back)
    }

    fn clear(&self, layout: &Layout, rows: &mut Vec<[f32; LANES]>) {
        let all = layout.k_dim + layout.v_dim + self.packed.k_dim + self.packed.v_dim;
        rows.clear();
        rows.resize(all as usize, [0.0; LANES]);
    }

    /// Folds query `q`, times `factor`, to the stored width in `out`; returns the constant term of its scores.
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

    /// Reads key and value of the token at `lane`, decoded to the head's channels.
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
    /// Scratch: channel rows of the page that is being packed.
    static ROWS: RefCell<Vec<[f32; LANES]>> = const { RefCell::new(Vec::new()) };
}

/// A packed page to pack again.
#[derive(Clone, Copy)]
pub(crate) struct Old<'a> {
    pub words: &'a [u32],
    pub fill: u32,
    pub last: u32,
}

/// The rows that a page stores beside its tokens, `[rows][channels]`: means, or a basis and its mean. Empty for other codings.
fn table(coding: &Coding, x: &[[f32; LANES]], fill: u32) -> Vec<f32> {
    let rows = || -> Vec<f32> { (0..fill as usize).flat_map(|t| x.iter().map(move |row| row[t])).collect() };
    match coding.form {
        StoredForm::Plain | StoredForm::Map(_) => Vec::new(),
        StoredForm::Means(level) => c_py_lit::means(&rows(), x.len(), 1 << level, |_, _| ()),
        StoredForm::Basis(rank) => {
            let found = c_ch_lit::basis(&rows(), x.len(), rank as usize);
            [found.basis, found.mean].concat()
        }
    }
}

/// The channels to code: those of `x` after the coding's map. `out` is scratch of that width.
fn mapped<'a>(
    coding: &'a Coding,
    table: &'a [f32],
    x: &'a mut [[f32; LANES]],
    out: &'a mut [[f32; LANES]],
) -> Channels<'a> {
    let turn = match &coding.form {
        StoredForm::Plain | StoredForm::Means(_) => return Channels { rows: x, map: None },
        StoredForm::Map(map) => map.turn(),
        StoredForm::Basis(rank) => {
            let (encode, bias) = table.split_at(*rank as usize * x.len());
            Turn::Dense { encode, bias }
        }
    };
    Channels { rows: x, map: Some((turn, out)) }
}
