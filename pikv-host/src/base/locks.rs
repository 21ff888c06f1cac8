//! Locks, channels and threads for what several threads change at once.
//!
//! With `--cfg pikv_shuttle` they are those of the crate `shuttle`, under which `tests/orders` tries many orders in which threads come to
//! them.

#[cfg(pikv_shuttle)]
pub use shuttle::{
    sync::{Condvar, Mutex, MutexGuard, RwLock, mpsc},
    thread,
};
#[cfg(not(pikv_shuttle))]
pub use std::{
    sync::{Condvar, Mutex, MutexGuard, RwLock, mpsc},
    thread,
};
