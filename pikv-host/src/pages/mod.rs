//! The page table of a sequence: the tokens in each page of each KV head.

pub mod compact;
pub mod cut;
pub mod entry;
pub mod filing;
pub mod find;
pub mod ghosts;
pub mod head;
pub mod homes;
pub mod past;
pub mod remember;
pub mod run;
pub mod runs;
pub mod saved;
pub mod seal;
pub mod sealed;
pub mod settle;
pub mod tags;
pub mod tiles;
