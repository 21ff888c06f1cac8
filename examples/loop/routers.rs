//! The routers of the table.

use pikv::router::{
    Adaptive, CacheAware, EntropyPenalised, Hashed, Hierarchical, LoadBalanced, Router, Shape, TopK,
};
use std::error::Error;

pub const NAMES: [&str; 7] = ["R_B", "R_T", "R_LB", "R_P", "R_E", "R_A", "R_H"];

/// Seed of R_A's draws; the other routers draw nothing.
pub const SEED: u64 = 1;

/// A router for each layer; none for a dense model.
pub fn routers(
    id: &str,
    experts: u32,
    top_k: u32,
    layers: usize,
) -> Result<Vec<Box<dyn Router>>, Box<dyn Error>> {
    let shape = Shape::new(experts, top_k);
    let router = |layer: usize| -> Result<Box<dyn Router>, Box<dyn Error>> {
        Ok(match id {
            "R_B" => Box::new(Hashed::default().router(shape)?),
            "R_LB" => Box::new(LoadBalanced::default().router(shape)?),
            "R_P" => Box::new(CacheAware::default().router(shape)?),
            "R_E" => Box::new(EntropyPenalised::default().router(shape)?),
            "R_A" => Box::new(Adaptive::new(top_k, SEED + layer as u64).router(shape)?),
            "R_H" => Box::new(Hierarchical::fitting(experts, top_k).router(shape)?),
            _ => Box::new(TopK.router(shape)?),
        })
    };
    (0..layers).map(router).collect()
}
