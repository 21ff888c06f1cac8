//! Partial results and their joins on the CPU.

use crate::attend::tree::{Split, Subtree};
use crate::codec::HeadCodec;
use pikv_core::merge::Partial;
use pikv_core::page::{Layout, MAX_DIM, PAGE};
use pikv_core::warp::LANES;
use pikv_lanes::{Lanes, merge::join};

/// Shape of the partial results in one tree.
#[derive(Clone, Copy)]
pub(crate) struct Tree {
    pub lanes: Lanes,
    /// Rows of lanes in the output of one query row.
    pub acc_rows: u32,
    pub rows: usize,
}

/// The trees of a head: over full pages, and over the pages of each codec.
pub(crate) struct Trees<'a> {
    full: Tree,
    packed: [Tree; 2],
    layout: &'a Layout,
    codecs: [Option<&'a HeadCodec>; 2],
}

impl<'a> Trees<'a> {
    pub fn new(
        lanes: Lanes,
        layout: &'a Layout,
        codecs: [Option<&'a HeadCodec>; 2],
        rows: usize,
    ) -> Trees<'a> {
        let full = Tree { lanes, acc_rows: layout.acc_rows(), rows };
        let packed =
            codecs.map(|codec| Tree { acc_rows: codec.map_or(0, |codec| codec.packed.acc_rows()), ..full });
        Trees { full, packed, layout, codecs }
    }

    /// The tree over the pages of a codec, or over full pages.
    pub fn of(&self, codec: Option<usize>) -> &Tree {
        codec.map_or(&self.full, |codec| &self.packed[codec])
    }

    /// Converts a partial result over packed pages to the head's channels.
    pub fn unpack(&self, codec: usize, part: &mut [f32], out: &mut [f32]) {
        let tree = &self.packed[codec];
        let Some(codec) = self.codecs[codec] else { unreachable!("only a codec packs pages") };
        let (from, to) = (tree.partial(part), self.full.partial(out));
        let (from_rows, to_rows) = (tree.acc_rows as usize, self.full.acc_rows as usize);
        let (layout, packed) = (self.layout, &codec.packed);
        let (mut stored, mut whole) = ([0.0; MAX_DIM as usize], [0.0; MAX_DIM as usize]);
        let (stored, whole) = (&mut stored[..packed.out_dim() as usize], &mut whole[..layout.v_dim as usize]);
        for r in 0..self.full.rows {
            (to.m[r], to.l[r]) = (from.m[r], from.l[r]);
            if from.m[r] == f32::NEG_INFINITY {
                continue;
            }
            let acc = &from.acc[r * from_rows..][..from_rows];
            for (c, x) in (0..).zip(stored.iter_mut()) {
                let (row, lane) = packed.acc_place(c);
                *x = acc[row as usize][lane as usize];
            }
            let whole: &[f32] = match codec.codec.v.mapped() {
                None => stored,
                Some(map) => {
                    map.decode_sum(stored, from.l[r], whole);
                    whole
                }
            };
            let acc = &mut to.acc[r * to_rows..][..to_rows];
            acc.fill([0.0; LANES]);
            let per_word = layout.v.per_word();
            for (c, x) in (0u32..).zip(whole) {
                let (word, part) = (c / per_word, c % per_word);
                acc[(word / PAGE * per_word + part) as usize][(word % PAGE) as usize] = *x;
            }
        }
    }
}

/// Writes the partial result of a leaf; the buffers are scratch memory.
pub(crate) type Leaf<'a> = dyn FnMut(usize, &mut [f32], &mut Vec<Vec<f32>>) + 'a;

impl Tree {
    pub fn len(&self) -> usize {
        Partial::len(self.rows, self.acc_rows)
    }

    pub fn partial<'b>(&self, buffer: &'b mut [f32]) -> Partial<'b> {
        Partial::new(buffer, self.rows, self.acc_rows)
    }

    /// Joins two partial results into `left`, which has the lower leaves.
    pub fn join(&self, left: &mut [f32], right: &mut [f32]) {
        join(self.lanes, self.partial(left), self.partial(right));
    }

    /// Joins the leaves of a subtree into `out`; clears `out` if there are none. `leaf(i, ..)` writes the partial result of leaf `i` of the
    /// list. `spare` holds buffers between calls.
    pub fn reduce(&self, tree: Subtree<'_>, leaf: &mut Leaf<'_>, out: &mut [f32], spare: &mut Vec<Vec<f32>>) {
        match tree.split() {
            Split::Empty => self.partial(out).clear(),
            Split::Leaf(i) => leaf(i, out, spare),
            Split::Join(left, right) => {
                self.reduce(left, leaf, out, spare);
                let mut part = spare.pop().unwrap_or_default();
                part.resize(self.len().max(part.len()), 0.0);
                self.reduce(right, leaf, &mut part[..self.len()], spare);
                self.join(out, &mut part[..self.len()]);
                spare.push(part);
            }
        }
    }
}
