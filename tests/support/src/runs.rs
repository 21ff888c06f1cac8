//! The run of pages in which a token is filed, written out for models of the store.

/// The run, from 0, of the token at `position` with home expert `home`: the home expert modulo the number of runs. That number is the
/// number of experts, halved until it is at most 8, or at most one for each 128 tokens that a layer with this window can hold at `position`.
pub fn run(experts: u32, window: Option<u32>, position: u32, home: u16) -> u16 {
    let held = position.min(window.unwrap_or(position));
    let fits = |runs: &u32| *runs <= 8 || *runs * 128 <= held;
    let runs = std::iter::successors(Some(experts), |runs| Some(runs / 2)).find(fits);
    (u32::from(home) % runs.unwrap_or(1)) as u16
}
