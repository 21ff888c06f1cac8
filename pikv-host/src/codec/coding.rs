//! What becomes of a head's tokens once they left the ring.

use super::map::Map;
use crate::error::ConfigError;
use crate::lanes::Lanes;
use pikv_core::codec::code::Code;
use pikv_core::codec::pack::{Turn, pack, turn, unpack};
use pikv_core::codec::packed::Packed;
use pikv_core::page::{Layout, Position, Unstorable};
use pikv_core::warp::{Kernel, LANES, Warp};
use std::cell::RefCell;

/// How K or V is stored in packed pages: a code, of the channels themselves or of what a map makes of them.
#[derive(Clone, Debug)]
pub struct Coding {
    code: Code,
    map: Option<Map>,
}

impl Coding {
    /// The channels as they are, in `code`.
    pub const fn new(code: Code) -> Coding {
        Coding { code, map: None }
    }

    /// What `map` makes of a row is coded instead.
    pub fn map(mut self, map: Map) -> Coding {
        self.map = Some(map);
        self
    }

    /// The code.
    pub const fn code(&self) -> Code {
        self.code
    }

    /// The map, if there is one.
    pub const fn mapped(&self) -> Option<&Map> {
        self.map.as_ref()
    }

    /// Stored channels of a row of `dim`.
    pub fn stored(&self, dim: u32) -> u32 {
        self.map.as_ref().map_or(dim, Map::narrow)
    }

    /// The largest magnitude of a channel that this can store, with a hundredth of room for the roundings of the head's dtype
    /// and of the map.
    pub fn limit(&self) -> f32 {
        let top = 0.99 * self.code.limit();
        self.map.as_ref().map_or(top, |map| map.limit(top))
    }
}

/// How a head's tokens are packed, 32 at a time, once they left the ring: K and V apart.
///
/// Sinks, the ring, and an expert's last page until it is full stay as they came.
///
/// ```
/// use pikv_host::codec::{Code, Codec, Coding, Map};
/// // 4 bits, keys turned by a Hadamard transform first.
/// let codec = Codec::new(Coding::new(Code::Int4).map(Map::hadamard(128)?), Coding::new(Code::Int4));
/// let page = codec.packed(128, 128);
/// // 4.5 bits a channel of K (a scale and a minimum for 32 tokens), 5 of V (for 32 channels), and the positions.
/// assert_eq!(page.bytes(), 32 * 128 / 2 * 2 + 128 * 4 + 32 * 4 * 4 + 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
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
    pub k_limit: f32,
    pub v_limit: f32,
}

impl HeadCodec {
    /// # Errors
    /// A map of another width than the head's.
    pub fn new(layer: usize, layout: &Layout, codec: &Codec) -> Result<HeadCodec, ConfigError> {
        let widths = [("k", &codec.k, layout.k_dim), ("v", &codec.v, layout.v_dim)];
        for (what, coding, dim) in widths {
            if let Some(wide) = coding.map.as_ref().map(Map::wide).filter(|wide| *wide != dim) {
                return Err(ConfigError::Map { layer, what, wide, dim });
            }
        }
        Ok(HeadCodec {
            packed: codec.packed(layout.k_dim, layout.v_dim),
            k_limit: codec.k.limit(),
            v_limit: codec.v.limit(),
            codec: codec.clone(),
        })
    }

    /// Whether a token can be stored, however its dtype rounds it.
    ///
    /// # Errors
    /// The first channel that cannot.
    pub fn check(&self, key: &[f32], value: &[f32]) -> Result<(), Unstorable> {
        for (key, limit, row) in [(true, self.k_limit, key), (false, self.v_limit, value)] {
            if let Some(channel) = row.iter().position(|x| x.abs() > limit) {
                return Err(Unstorable { key, channel: channel as u32, value: row[channel] });
            }
        }
        Ok(())
    }

    /// Packs the first `fill` tokens of `page`.
    pub fn pack(&self, lanes: Lanes, layout: &Layout, page: &[u32], fill: u32, out: &mut [u32]) {
        ROWS.with_borrow_mut(|rows| lanes.run(Close { head: self, layout, page, fill, out, rows }));
    }

    /// What is left of query `q`, times `factor`, in `out`; returns what its scores start from.
    pub fn fold(&self, q: &[f32], factor: f32, out: &mut [f32]) -> f32 {
        let out = &mut out[..self.packed.k_dim as usize];
        let start = match &self.codec.k.map {
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
            match &coding.map {
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

/// Packs one page on the lanes.
struct Close<'a> {
    head: &'a HeadCodec,
    layout: &'a Layout,
    page: &'a [u32],
    fill: u32,
    out: &'a mut [u32],
    rows: &'a mut Vec<[f32; LANES]>,
}

impl Kernel for Close<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let Close { head, layout, page, fill, out, rows } = self;
        let (k_dim, v_dim) = (layout.k_dim as usize, layout.v_dim as usize);
        let (k_stored, v_stored) = (head.packed.k_dim as usize, head.packed.v_dim as usize);
        rows.clear();
        rows.resize(k_dim + v_dim + k_stored + v_stored, [0.0; LANES]);
        let (k, rest) = rows.split_at_mut(k_dim);
        let (v, rest) = rest.split_at_mut(v_dim);
        let (k_mapped, v_mapped) = rest.split_at_mut(k_stored);
        unpack(w, layout, bytemuck::cast_slice(page), fill, k, v);
        let k = mapped(w, &head.codec.k, k, k_mapped);
        let v = mapped(w, &head.codec.v, v, v_mapped);
        pack(w, &head.packed, &page[..fill as usize], k, v, bytemuck::cast_slice_mut(out));
    }
}

#[inline(always)]
fn mapped<'a, W: Warp>(
    w: W,
    coding: &Coding,
    x: &'a mut [[f32; LANES]],
    out: &'a mut [[f32; LANES]],
) -> &'a mut [[f32; LANES]] {
    match coding.map.as_ref().map(Map::turn) {
        None => x,
        Some(form) => {
            let form: Turn<'_> = form;
            turn(w, &form, x, out);
            out
        }
    }
}
