//! Types and helpers for all folders, which import none of them.

pub mod chunks;
pub mod deque;
pub mod device_slice;
pub mod error;
pub mod failures;
pub mod fields;
pub mod files;
pub mod frequencies;
pub mod host_slice;
pub mod huge_pages;
pub mod ids;
pub mod locks;
pub mod page_sum;
pub mod parallel;
pub mod rope_tables;
pub mod scratch;
pub mod text;
