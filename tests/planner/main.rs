//! The planner: forecasts of bytes, step times, the paper's formulas, and placement of pages in tiers.

mod even;
mod flexgen;
mod forecast;
