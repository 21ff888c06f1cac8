//! The runs of pages of a head.

use crate::pages::run::Run;
use crate::policy::state::TokenStates;
use pikv_lanes::fetch;
use std::ops::{Index, IndexMut};
use std::sync::LazyLock;

/// The sinks, then each expert. Only runs with filed tokens exist, because a model can have thousands of experts; the others read as a run
/// without pages, and take no memory.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    /// Existing runs by ascending index.
    made: Vec<(usize, Box<Run>)>,
    /// Number of possible runs.
    most: usize,
    /// Words of the policy's state for each token, and the number of versions.
    kept: (usize, usize),
}

/// A run without pages.
static BLANK: LazyLock<Run> = LazyLock::new(Run::default);

impl Runs {
    /// Runs for the sinks and `experts` experts; a policy keeps `words` of each token in `versions` versions.
    pub fn new(experts: u32, (words, versions): (usize, usize)) -> Runs {
        Runs { made: Vec::new(), most: experts as usize + 1, kept: (words, versions) }
    }

    /// Number of possible runs: the sinks, and one for each expert.
    pub fn most(&self) -> usize {
        self.most
    }

    fn at(&self, c: usize) -> Result<usize, usize> {
        self.made.binary_search_by_key(&c, |(made, _)| *made)
    }

    /// Existing runs, by index.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, &Run)> + Clone {
        self.made.iter().map(|(c, run)| (*c, &**run))
    }

    /// Existing runs for writing.
    pub fn iter_mut(&mut self) -> impl DoubleEndedIterator<Item = (usize, &mut Run)> {
        self.made.iter_mut().map(|(c, run)| (*c, &mut **run))
    }

    /// Existing runs without the sinks: run `1 + e` is that of expert `e`.
    pub fn experts(&self) -> impl DoubleEndedIterator<Item = (usize, &Run)> + Clone {
        self.iter().filter(|(c, _)| *c > 0)
    }

    /// Existing runs without the sinks, for writing.
    pub fn experts_mut(&mut self) -> impl DoubleEndedIterator<Item = (usize, &mut Run)> {
        self.iter_mut().filter(|(c, _)| *c > 0)
    }

    /// Run `c`, if it exists.
    pub fn made_mut(&mut self, c: usize) -> Option<&mut Run> {
        let at = self.at(c).ok()?;
        Some(&mut self.made[at].1)
    }

    /// Run `c`, without pages if it does not exist; `None` if `c` is out of range.
    pub fn get(&self, c: usize) -> Option<&Run> {
        (c < self.most).then(|| &self[c])
    }

    /// Prefetches the newest page of the last run in `made`, a pointer of the way to it each time: `step` is 0 to 4.
    pub fn fetch_newest(&self, step: usize) {
        match (self.made.last(), step) {
            (Some(made), 0) => fetch(made),
            (Some((_, run)), 1) => fetch(&**run),
            (Some((_, run)), _) => run.entries.fetch_back(step - 2),
            (None, _) => (),
        }
    }

    /// Bytes of the lists, from their capacities.
    pub fn table_bytes(&self) -> u64 {
        let runs: u64 = self.made.iter().map(|(_, run)| size_of::<Run>() as u64 + run.table_bytes()).sum();
        runs + (self.made.capacity() * size_of::<(usize, Box<Run>)>()) as u64
    }

    /// The runs, each converted by `made`.
    pub fn map<E>(&self, mut made: impl FnMut(usize, &Run) -> Result<Run, E>) -> Result<Runs, E> {
        let runs = self.iter().map(|(c, run)| Ok((c, Box::new(made(c, run)?))));
        Ok(Runs { made: runs.collect::<Result<_, E>>()?, ..*self })
    }
}

impl Index<usize> for Runs {
    type Output = Run;

    fn index(&self, c: usize) -> &Run {
        self.at(c).map_or(&*BLANK, |at| &self.made[at].1)
    }
}

impl IndexMut<usize> for Runs {
    /// Creates the run if it does not exist.
    fn index_mut(&mut self, c: usize) -> &mut Run {
        let at = self.at(c).unwrap_or_else(|at| {
            let (words, versions) = self.kept;
            // No policy ranks sinks.
            let kept = if c > 0 { TokenStates::new(words, versions) } else { TokenStates::default() };
            self.made.insert(at, (c, Box::new(Run::new(kept))));
            at
        });
        &mut self.made[at].1
    }
}
