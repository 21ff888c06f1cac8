//! The planner: bytes foretold, step times, the paper's formulas, and pages over tiers.

mod even;
mod flexgen;
mod forecast;
