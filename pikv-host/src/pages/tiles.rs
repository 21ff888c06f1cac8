//! The ring of a KV head: its pages, and the policy's state of their tokens.

use crate::base::error::Error;
use crate::base::fields::Fields;
use crate::memory::arena::Page;
use crate::policy::state::TokenStates;
use std::collections::VecDeque;
use std::ops::Deref;

/// Pages of a ring by position, with a tile of the policy's state for each. Reads as the list of pages.
#[derive(Clone, Debug)]
pub(crate) struct Tiles {
    pages: VecDeque<Page>,
    states: TokenStates,
}

impl Tiles {
    /// A ring without pages; `states` has no tile.
    pub fn new(states: TokenStates) -> Tiles {
        Tiles { pages: VecDeque::new(), states }
    }

    /// A ring of other `pages` under the same policy, with initial state.
    pub fn of_pages(&self, pages: VecDeque<Page>) -> Tiles {
        let mut states = self.states.clone();
        states.truncate(0);
        pages.iter().for_each(|_| states.push_back());
        Tiles { pages, states }
    }

    /// Adds a page, with initial state.
    pub fn push_tile(&mut self, page: Page) {
        self.pages.push_back(page);
        self.states.push_back();
    }

    /// Removes the oldest page, and its state.
    pub fn pop_tile(&mut self) {
        self.pages.pop_front();
        self.states.pop_front();
    }

    /// Removes all but the oldest `tiles` pages, and their state.
    pub fn truncate_tiles(&mut self, tiles: usize) {
        self.pages.truncate(tiles);
        self.states.truncate(tiles);
    }

    /// Page `at`, and the state of all tiles, whose number stays.
    pub fn tile_mut(&mut self, at: usize) -> (&mut Page, &mut TokenStates) {
        (&mut self.pages[at], &mut self.states)
    }

    /// The newest page.
    pub fn newest_mut(&mut self) -> Option<&mut Page> {
        self.pages.back_mut()
    }

    /// The pages, oldest first.
    pub fn pages_mut(&mut self) -> impl Iterator<Item = &mut Page> {
        self.pages.iter_mut()
    }

    /// The policy's state of the tokens of each page.
    pub fn states(&self) -> &TokenStates {
        &self.states
    }

    /// The policy's state, whose number of tiles stays.
    pub fn states_mut(&mut self) -> &mut TokenStates {
        &mut self.states
    }

    /// Takes `pages` and reads the state of `tiles` tiles; `self` has no page. Fewer pages than tiles are those of the first tokens alone,
    /// which have no policy.
    ///
    /// # Errors
    /// Errors of [`TokenStates::load`].
    pub fn load(&mut self, pages: VecDeque<Page>, from: &mut Fields<'_>, tiles: usize) -> Result<(), Error> {
        self.pages = pages;
        self.states.load(from, tiles)
    }

    /// Bytes of the lists, from their capacities.
    pub fn table_bytes(&self) -> u64 {
        (self.pages.capacity() * size_of::<Page>()) as u64 + self.states.bytes()
    }
}

impl Deref for Tiles {
    type Target = VecDeque<Page>;

    fn deref(&self) -> &VecDeque<Page> {
        &self.pages
    }
}
