//! A list and a drawing of the pages of a sequence.

use crate::base::ids::Place;
use crate::base::text::Bytes;
use crate::cache::held::PageInfo;
use crate::cache::sequence::Sequence;
use pikv_core::page::PAGE;
use std::fmt::Write;

/// Storage form of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StorageForm {
    /// Not full: takes more tokens.
    Open,
    /// Full, in the stored dtypes.
    Full,
    /// Packed by the head's codec.
    Packed,
    /// Packed again by the codec of old pages.
    PackedAgain,
    /// In a lower tier, in any codec.
    LowerTier,
    /// On a rank of a fabric, in any codec.
    Rank,
}

impl StorageForm {
    /// All forms.
    pub const ALL: [StorageForm; 6] = [
        StorageForm::Open,
        StorageForm::Full,
        StorageForm::Packed,
        StorageForm::PackedAgain,
        StorageForm::LowerTier,
        StorageForm::Rank,
    ];

    fn name(self) -> &'static str {
        ["open", "full", "packed", "packed again", "lower tier", "on a rank"][self as usize]
    }

    fn color(self) -> &'static str {
        ["#e69f00", "#0072b2", "#009e73", "#56b4e9", "#999999", "#cc79a7"][self as usize]
    }
}

impl PageInfo {
    /// Storage form of the page.
    pub fn form(&self) -> StorageForm {
        match self {
            PageInfo { remote: true, .. } => StorageForm::Rank,
            PageInfo { tier: 1.., .. } => StorageForm::LowerTier,
            PageInfo { aged: true, .. } => StorageForm::PackedAgain,
            PageInfo { packed: true, .. } => StorageForm::Packed,
            PageInfo { open: true, .. } => StorageForm::Open,
            _ => StorageForm::Full,
        }
    }
}

/// The pages of a sequence at one moment, and a drawing of them: [`Sequence::map`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SequenceMap {
    /// Tokens of the sequence.
    pub len: u32,
    /// `[layers][kv_heads]`: the pages that hold tokens, as [`Sequence::pages`] lists them.
    pub heads: Vec<Vec<Vec<PageInfo>>>,
    /// Bytes of pages of the first tier that only a rollback would read.
    pub past: u64,
}

impl Sequence {
    /// Lists the pages of the sequence. O(pages).
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let cache = Cache::new(CacheConfig::new(vec![LayerShape::new(2, 4, 8, Dtype::Bf16); 2], 1 << 20).ring(32))?;
    /// let mut sequence = cache.sequence();
    /// let mut step = cache.begin([(&mut sequence, 100)])?;
    /// for layer in 0..2 {
    ///     step.append(layer, &[0.5; 100 * 2 * 8], &[0.5; 100 * 2 * 8])?;
    /// }
    /// step.commit()?;
    /// let map = sequence.map();
    /// assert_eq!(map.bytes(), cache.usage().taken);
    /// assert!(map.svg().starts_with("<svg"));
    /// # Ok::<(), pikv::Error>(())
    /// ```
    pub fn map(&self) -> SequenceMap {
        let layers = self.layer_heads();
        let pages = |(layer, heads)| {
            (0..heads).map(|head| self.pages(layer, head).map_or(Vec::new(), Iterator::collect)).collect()
        };
        SequenceMap {
            len: self.next_position().0,
            heads: layers.enumerate().map(pages).collect(),
            past: self.past_bytes(),
        }
    }
}

fn short_name(place: Place) -> String {
    match place {
        Place::Sinks => "sinks".to_owned(),
        Place::Run(expert) => expert.to_string(),
        Place::Ring => "ring".to_owned(),
    }
}

impl SequenceMap {
    /// Bytes in the first tier, equal to [`Sequence::bytes`].
    pub fn bytes(&self) -> u64 {
        self.pages().filter(|page| page.tier == 0).map(|page| page.bytes).sum::<u64>() + self.past
    }

    /// Number of pages in this form over all layers and heads, and their bytes.
    pub fn count(&self, form: StorageForm) -> (usize, u64) {
        let pages = self.pages().filter(|page| page.form() == form);
        pages.fold((0, 0), |(count, bytes), page| (count + 1, bytes + page.bytes))
    }

    fn pages(&self) -> impl Iterator<Item = &PageInfo> {
        self.heads.iter().flatten().flatten()
    }

    /// A drawing in SVG: one row for each KV head of each layer, one bar for each page. The height of a bar is the share of its tokens that
    /// are left, its colour the [`StorageForm`]; older pages are paler. Runs are separated: sinks, experts, and the ring at the right. About 70
    /// bytes a page.
    pub fn svg(&self) -> String {
        const WIDE: usize = 6;
        const HIGH: usize = 14;
        const LEFT: usize = 92;
        const TOP: usize = 44;
        let mut runs: Vec<(Place, usize)> = Vec::new();
        for head in self.heads.iter().flatten() {
            for page in head {
                let count = head.iter().filter(|other| other.id.place == page.id.place).count();
                match runs.iter_mut().find(|(place, _)| *place == page.id.place) {
                    Some((_, most)) => *most = count.max(*most),
                    None => runs.push((page.id.place, count)),
                }
            }
        }
        runs.sort_by_key(|(place, _)| match place {
            Place::Sinks => (0, 0),
            Place::Run(expert) => (1, *expert),
            Place::Ring => (2, 0),
        });
        let names: Vec<String> = runs.iter().map(|(place, _)| short_name(*place)).collect();
        let widths =
            runs.iter().zip(&names).map(|((_, most), name)| (most * WIDE).max(WIDE * name.len()) + 10);
        let starts: Vec<usize> =
            widths.clone().scan(LEFT, |x, wide| Some(std::mem::replace(x, *x + wide))).collect();
        let (legend, legend_width) = self.legend();
        let width = (widths.sum::<usize>() + LEFT).max(legend_width);
        let rows = self.heads.iter().map(Vec::len).sum::<usize>();
        let height = TOP + rows * (HIGH + 2) + self.heads.len() * 4 + 12;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" font-family=\"sans-serif\" font-size=\"10\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{legend}",
        );
        for (name, start) in names.iter().zip(&starts) {
            let _ = writeln!(out, "<text x=\"{start}\" y=\"{}\">{name}</text>", TOP - 6);
        }
        let _ = writeln!(out, "<text x=\"8\" y=\"{}\">expert</text>", TOP - 6);
        let mut y = TOP;
        for (layer, heads) in self.heads.iter().enumerate() {
            for (head, pages) in heads.iter().enumerate() {
                let _ =
                    writeln!(out, "<text x=\"8\" y=\"{}\">layer {layer}, head {head}</text>", y + HIGH - 3);
                self.row(&mut out, pages, &runs, &starts, y, (WIDE, HIGH));
                y += HIGH + 2;
            }
            y += 4;
        }
        out + "</svg>\n"
    }

    /// The legend (form, number of pages, bytes, for each colour), and its width in pixels.
    fn legend(&self) -> (String, usize) {
        let (mut out, mut x) = (String::new(), 8);
        for form in StorageForm::ALL {
            let (count, bytes) = self.count(form);
            if count > 0 {
                let text = format!("{}: {count} pages, {}", form.name(), Bytes(bytes));
                let _ = writeln!(
                    out,
                    "<rect x=\"{x}\" y=\"6\" width=\"10\" height=\"10\" fill=\"{}\"/><text x=\"{}\" y=\"15\">{text}</text>",
                    form.color(),
                    x + 14,
                );
                x += 26 + 6 * text.len();
            }
        }
        (out, x)
    }

    /// Draws the bars of one head, one SVG path for each form and shade.
    fn row(
        &self,
        out: &mut String,
        pages: &[PageInfo],
        runs: &[(Place, usize)],
        starts: &[usize],
        y: usize,
        (wide, high): (usize, usize),
    ) {
        let mut paths: Vec<((StorageForm, u32), String)> = Vec::new();
        for ((place, _), start) in runs.iter().zip(starts) {
            for (i, page) in pages.iter().filter(|page| page.id.place == *place).enumerate() {
                let tall = (page.tokens as usize * high).div_ceil(PAGE as usize);
                let shade = 4 + 6 * page.last.0 / self.len.max(1);
                let bar =
                    format!("M{} {}h{}v{tall}h-{}z", start + i * wide, y + high - tall, wide - 1, wide - 1);
                let key = (page.form(), shade.min(10));
                match paths.iter_mut().find(|(of, _)| *of == key) {
                    Some((_, path)) => path.push_str(&bar),
                    None => paths.push((key, bar)),
                }
            }
        }
        for ((form, shade), path) in paths {
            let opacity = f64::from(shade) / 10.0;
            let _ = writeln!(out, "<path fill=\"{}\" opacity=\"{opacity}\" d=\"{path}\"/>", form.color());
        }
    }
}
