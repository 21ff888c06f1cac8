//! The planner: bytes foretold, step times, the paper's formulas, and pages over tiers.

mod flexgen;
mod forecast;
