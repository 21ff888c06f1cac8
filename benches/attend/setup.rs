//! What is attended to, and the float64 softmax that it is checked against.

use crate::{HEAD_DIM, KV_HEADS, QUERY_HEADS, machine};
use pikv::codec::{Code, Codec, Coding};
use pikv::lanes::Lanes;
use pikv::report::Place;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Position, Rows, Sequence};
use std::error::Error;

pub const OPTIONS: Attend = Attend::new(0.088_388_35);
/// Rows of a prefill and of a step while the sequences are built.
const RING: u32 = 512;

/// How pages are stored.
pub struct Form {
    pub name: &'static str,
    dtype: Dtype,
    codec: Option<Codec>,
    /// `Attend::fast`
    fast: bool,
}

impl Form {
    /// Every stored form, and the packed forms over bf16.
    pub fn all() -> Vec<Form> {
        let plain = |dtype: Dtype| Form { name: dtype.name(), dtype, codec: None, fast: false };
        let packed = |name, code| {
            let codec = Codec::new(Coding::new(code), Coding::new(code));
            Form { name, dtype: Dtype::Bf16, codec: Some(codec), fast: false }
        };
        let mut all: Vec<_> = Dtype::ALL.into_iter().map(plain).collect();
        all.extend([packed("int8", Code::Int8), packed("int4", Code::Int4)]);
        all
    }

    /// bf16 with `Attend::fast`, for prompts.
    pub fn fast() -> Form {
        Form { name: "bf16 fast", dtype: Dtype::Bf16, codec: None, fast: true }
    }

    pub fn options(&self) -> Attend {
        OPTIONS.fast(self.fast)
    }

    /// Attention may ask for a sequence's newest rows, up to `rows` of them.
    pub fn cache(&self, lanes: Lanes, rows: u32) -> Result<Cache, pikv::Error> {
        let dim = HEAD_DIM as u32;
        let (kv_heads, query_heads) = (KV_HEADS as u32, QUERY_HEADS as u32);
        let layer = LayerShape::new(kv_heads, query_heads, dim, self.dtype);
        let mut config = CacheConfig::new(vec![layer], 4 << 30).ring(RING).rollback(rows - 1).lanes(lanes);
        if let Some(codec) = &self.codec {
            config = config.compress(codec.clone());
        }
        Cache::new(config)
    }

    /// KV bytes that a row reads: of its tokens, or of the pages where those are packed.
    pub fn bytes(&self, sequence: &Sequence) -> f64 {
        match self.codec {
            Some(_) => sequence.bytes() as f64,
            None => {
                let token = 2 * HEAD_DIM * KV_HEADS * self.dtype.bits() as usize / 8;
                sequence.next_position().0 as f64 * token as f64
            }
        }
    }

    /// Queries and weights are rounded to 16 bits against integers, and to 8 with `Attend::fast`.
    fn tolerance(&self) -> f64 {
        match (self.fast, &self.codec) {
            (true, _) => 2e-3,
            (_, Some(_)) => 5e-5,
            _ => 1e-5,
        }
    }
}

pub fn grow(cache: &Cache, context: u32) -> Result<Sequence, pikv::Error> {
    let mut sequence = cache.sequence();
    let noise: Vec<f32> = machine::noise(1).take(1 << 20).collect();
    let row = KV_HEADS * HEAD_DIM;
    for first in (0..context).step_by(RING as usize) {
        let n = RING.min(context - first);
        let at = first as usize / RING as usize * 7919 % (noise.len() - RING as usize * row);
        let (k, v) = (&noise[at..at + n as usize * row], &noise[at / 2..at / 2 + n as usize * row]);
        let mut step = cache.begin([(&mut sequence, n)])?;
        step.append(0, k, v)?;
        step.commit()?;
    }
    Ok(sequence)
}

/// The newest `n` rows of each.
pub fn rows(sequences: &[Sequence], n: u32) -> Vec<Rows<'_>> {
    let newest = |sequence| Rows::new(sequence, Position(Sequence::next_position(sequence).0 - n), n);
    sequences.iter().map(newest).collect()
}

/// Queries of so many rows.
pub fn queries(rows: usize) -> Vec<f32> {
    machine::noise(3).map(|x| 4.0 * x).take(rows * QUERY_HEADS * HEAD_DIM).collect()
}

/// Two query heads of the first and the last row of each sequence against float64 over what is stored. Returns the largest
/// difference.
pub fn check(cache: &Cache, parts: &[Rows<'_>], q: &[f32], form: &Form) -> Result<f64, Box<dyn Error>> {
    let mut out = vec![0.0; q.len()];
    cache.attend(0, parts, q, &form.options(), AttendOutput::new(&mut out))?;
    let (mut start, mut worst) = (0, 0.0f64);
    for part in parts {
        let mut at = vec![0, part.rows as usize - 1];
        at.dedup();
        for (row, head) in at.iter().flat_map(|&row| [(row, 0), (row, QUERY_HEADS - 1)]) {
            let from = ((start + row) * QUERY_HEADS + head) * HEAD_DIM;
            let expected = softmax(part, row, head, &q[from..][..HEAD_DIM])?;
            for (out, expected) in out[from..].iter().zip(expected) {
                let off = (f64::from(*out) - expected).abs();
                if off.is_nan() || off > form.tolerance() {
                    return Err(
                        format!("row {row}, head {head}: {out} where float64 gives {expected}").into()
                    );
                }
                worst = worst.max(off);
            }
        }
        start += part.rows as usize;
    }
    Ok(worst)
}

fn softmax(part: &Rows<'_>, row: usize, head: usize, q: &[f32]) -> Result<Vec<f64>, pikv::Error> {
    let (sequence, kv_head) = (part.sequence, head * KV_HEADS / QUERY_HEADS);
    let last = part.first.0 as usize + row;
    let (mut sum, mut total) = (vec![0.0; HEAD_DIM], 0.0);
    let (mut key, mut value) = (vec![0.0; HEAD_DIM], vec![0.0; HEAD_DIM]);
    for page in sequence.pages(0, kv_head)? {
        for lane in 0..page.tokens {
            let p = sequence.read(0, kv_head, page.id, lane, &mut key, &mut value)?.0 as usize;
            // The row finds the newest tokens up to its own in the ring, as they came, even where they are filed and packed by now.
            let newest = p + RING as usize > last;
            if p > last || newest != (page.id.place == Place::Ring) {
                continue;
            }
            let dot: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let weight = (dot * f64::from(OPTIONS.scale)).exp();
            total += weight;
            sum.iter_mut().zip(&value).for_each(|(s, v)| *s += weight * f64::from(*v));
        }
    }
    Ok(sum.into_iter().map(|s| s / total).collect())
}
