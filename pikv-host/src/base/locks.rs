//! Locks, channels and threads for state that several threads change.
//!
//! With `--cfg pikv_shuttle` they are those of the crate `shuttle`, under which `tests/orders` tries many schedules of the threads.

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
