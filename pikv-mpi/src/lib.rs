//! Ranks of [pikv](pikv::fabric) in processes, over MPI: by the `mpi` crate, over MPICH or Open MPI.
//!
//! All processes of the world start with the same configuration. Rank 0 is the front, and also keeps the pages of its shard; the others
//! [`serve`](Mpi::serve) until the front ends. Messages are words (`MPI_UINT32_T`). Each rank keeps its pages on the back end of the
//! configuration passed to [`serve`](Mpi::serve), rank 0 on that passed to [`front`](Mpi::front): a CUDA device each, for example.
//!
//! If the other ranks are to survive a process that dies, launcher and library must allow it. MPICH 4.0's launcher kills all processes when
//! one ends (with `-disable-auto-cleanup` too), unless it does not notice: start each rank from a shell that stays. Its UCX aborts
//! processes that share memory with a dead one by system calls: set `UCX_TLS=posix,self UCX_ERROR_SIGNALS=` on one machine.
//! `tests/mpi.rs` does both. After a loss no rank calls `MPI_Finalize`, which would wait for the dead one.
//!
//! ```no_run
//! use pikv::fabric::Options;
//! use pikv::shard::ShardMap;
//! use pikv::{Cache, CacheConfig, Dtype, LayerShape};
//! use pikv_mpi::Mpi;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mpi = Mpi::init()?;
//! let layer = LayerShape::new(2, 8, 64, Dtype::Bf16);
//! let config = CacheConfig::new(vec![layer; 4], 256 << 20).experts(8, 2).shards(ShardMap::sum(mpi.ranks())?);
//! if mpi.rank() > 0 {
//!     mpi.serve(&config, 1 << 30, Options::default().timeout)?; // until the front is gone
//!     return Ok(());
//! }
//! let cache = Cache::over(config.clone(), mpi.front(&config, 1 << 30)?, Options::default())?;
//! # let _ = cache;
//! # Ok(())
//! # }
//! ```

use mpi::environment::Universe;
use mpi::ffi;
use pikv::fabric::{Fabric, FabricError, RankStore};
use pikv::{CacheConfig, Error};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::fmt;
use std::mem::{MaybeUninit, forget};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Tag of all messages.
const TAG: c_int = 0;

/// The MPI of this process; there is at most one.
#[derive(Clone)]
pub struct Mpi {
    world: Arc<World>,
}

struct World {
    universe: Mutex<Option<Universe>>,
    /// Whether a process is lost: `MPI_Finalize` would wait for it.
    broken: AtomicBool,
    rank: u32,
    ranks: u32,
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mpi").field("rank", &self.world.rank).field("ranks", &self.world.ranks).finish()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.broken.load(Ordering::Relaxed) {
            forget(self.universe.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl Mpi {
    /// Initialises MPI, for calls from one thread at a time.
    ///
    /// # Errors
    /// [`FabricError::Transport`] if MPI was initialised before, or does not accept calls from several threads in turn.
    pub fn init() -> Result<Mpi, FabricError> {
        let failed = |what: &str| FabricError::Transport(what.to_owned());
        let (universe, threading) = mpi::initialize_with_threading(mpi::Threading::Serialized)
            .ok_or_else(|| failed("MPI was initialised before"))?;
        if threading < mpi::Threading::Serialized {
            return Err(failed("this MPI takes calls from one thread only"));
        }
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: MPI is initialised, and the world communicator exists until it is finalised; the pointers are to locals of the right
        // type.
        let codes = unsafe {
            [
                ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN),
                ffi::MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank),
                ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &mut ranks),
            ]
        };
        if codes.iter().any(|code| *code != 0) {
            return Err(failed("MPI does not say how many ranks there are"));
        }
        let broken = AtomicBool::new(false);
        let (rank, ranks) = (rank as u32, ranks as u32);
        Ok(Mpi { world: Arc::new(World { universe: Mutex::new(Some(universe)), broken, rank, ranks }) })
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.world.rank
    }

    /// Number of processes of the world.
    pub fn ranks(&self) -> u32 {
        self.world.ranks
    }

    /// The fabric of the front, for [`Cache::over`](pikv::Cache::over). The front is a rank too, with at most `budget` bytes of pages
    /// besides the cache's own.
    ///
    /// # Errors
    /// An invalid configuration; [`FabricError::Malformed`] on a rank other than 0.
    pub fn front(&self, config: &CacheConfig, budget: u64) -> Result<Box<dyn Fabric>, Error> {
        if self.world.rank != 0 {
            return Err(FabricError::Malformed { rank: self.world.rank, what: "the front is rank 0" }.into());
        }
        let near = RankStore::new(config, budget)?.parallel(true);
        let mail = Mail::new(self.world.clone(), (1..self.world.ranks).collect());
        Ok(Box::new(Processes { mail, near, queue: VecDeque::new() }))
    }

    /// Keeps the pages of this rank, with at most `budget` bytes, and answers the front until it ends; then returns the store, for
    /// [`RankStore::check`]. `timeout` is that of the front's [`Options`](pikv::fabric::Options); every rank gets a message of the front at least
    /// every quarter of `timeout`.
    ///
    /// # Errors
    /// An invalid configuration; [`FabricError::Lost`] if no message of the front arrives for three times `timeout`.
    pub fn serve(&self, config: &CacheConfig, budget: u64, timeout: Duration) -> Result<RankStore, Error> {
        let mut store = RankStore::new(config, budget)?.parallel(true);
        let mut mail = Mail::new(self.world.clone(), vec![0]);
        // The front may be waiting for another rank.
        let patience = 3 * timeout;
        loop {
            let Some((_, message)) = mail.receive(Instant::now() + patience)? else {
                self.world.broken.store(true, Ordering::Relaxed);
                return Err(FabricError::Lost { rank: 0, waited: patience }.into());
            };
            if RankStore::is_last(&message) {
                if RankStore::lost(&message) {
                    self.world.broken.store(true, Ordering::Relaxed);
                }
                return Ok(store);
            }
            if let Some(answer) = store.answer(&message) {
                mail.send(0, answer)?;
            }
        }
    }
}

/// A message in transit, with the memory that MPI reads or writes.
struct Flight {
    rank: u32,
    words: Vec<u32>,
    request: ffi::MPI_Request,
}

/// Messages to and from some ranks.
struct Mail {
    world: Arc<World>,
    from: Vec<u32>,
    /// Index of the rank to look at next, so that all ranks get their turn.
    next: usize,
    leaving: Vec<Flight>,
    /// At most one from each rank: a rank that dies in the middle of a message does not delay messages of others.
    coming: Vec<Flight>,
}

// SAFETY: a request or a communicator is not `Send` because it is a pointer of the MPI library. The library accepts calls from any
// thread, one at a time (`Threading::Serialized`, checked in `init`); `&mut self` and the lock of the link ensure the latter.
unsafe impl Send for Mail {}

impl Drop for Mail {
    fn drop(&mut self) {
        // The last messages get half a second. After that MPI may still read those in transit, so their memory is leaked.
        let until = Instant::now() + Duration::from_millis(500);
        while !self.leaving.is_empty() && Instant::now() < until {
            self.progress();
            thread::yield_now();
        }
        for flight in self.leaving.drain(..).chain(self.coming.drain(..)) {
            self.world.broken.store(true, Ordering::Relaxed);
            forget(flight.words);
        }
    }
}

/// Whether a request is complete; `Err` if it never will be.
fn test(flight: &mut Flight) -> Result<bool, ()> {
    let mut done = 0;
    let mut status = MaybeUninit::uninit();
    // SAFETY: the request is live until it is complete, and is not tested again after that.
    let code = unsafe { ffi::MPI_Test(&mut flight.request, &mut done, status.as_mut_ptr()) };
    if code == 0 { Ok(done != 0) } else { Err(()) }
}

impl Mail {
    fn new(world: Arc<World>, from: Vec<u32>) -> Mail {
        Mail { world, from, next: 0, leaving: Vec::new(), coming: Vec::new() }
    }

    /// Lets MPI make progress on messages to send.
    fn progress(&mut self) {
        self.leaving.retain_mut(|flight| match test(flight) {
            Ok(done) => !done,
            Err(()) => {
                forget(std::mem::take(&mut flight.words));
                false
            }
        });
    }

    fn send(&mut self, rank: u32, words: Vec<u32>) -> Result<(), FabricError> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: `words` has that many words, and is neither moved on the heap nor freed before the request is complete (never, if it does
        // not complete).
        let code = unsafe {
            ffi::MPI_Isend(
                words.as_ptr().cast(),
                words.len() as c_int,
                ffi::RSMPI_UINT32_T,
                rank as c_int,
                TAG,
                ffi::RSMPI_COMM_WORLD,
                request.as_mut_ptr(),
            )
        };
        if code != 0 {
            forget(words);
            return Err(FabricError::Lost { rank, waited: Duration::ZERO });
        }
        // SAFETY: MPI initialised it: the call returned success.
        let request = unsafe { request.assume_init() };
        self.leaving.push(Flight { rank, words, request });
        self.progress();
        Ok(())
    }

    /// Starts to receive a message that has arrived.
    fn probe(&mut self) -> Result<(), FabricError> {
        for i in 0..self.from.len() {
            let at = (self.next + i) % self.from.len();
            let rank = self.from[at];
            if self.coming.iter().any(|flight| flight.rank == rank) {
                continue;
            }
            let lost = FabricError::Lost { rank, waited: Duration::ZERO };
            let (mut found, mut count) = (0, 0);
            let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::uninit());
            // SAFETY: all pointers are to places of the right type for the results.
            let code = unsafe {
                ffi::MPI_Improbe(
                    rank as c_int,
                    TAG,
                    ffi::RSMPI_COMM_WORLD,
                    &mut found,
                    message.as_mut_ptr(),
                    status.as_mut_ptr(),
                )
            };
            if code != 0 {
                return Err(lost);
            }
            if found == 0 {
                continue;
            }
            // SAFETY: a message was found, so the status is initialised and has its length.
            let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT32_T, &mut count) };
            let mut words = vec![0u32; if code == 0 { count.max(0) as usize } else { 0 }];
            let mut request = MaybeUninit::uninit();
            // SAFETY: `words` has the length of the message, and stays until the request is complete, or is leaked.
            let code = unsafe {
                ffi::MPI_Imrecv(
                    words.as_mut_ptr().cast(),
                    words.len() as c_int,
                    ffi::RSMPI_UINT32_T,
                    message.as_mut_ptr(),
                    request.as_mut_ptr(),
                )
            };
            if code != 0 {
                return Err(lost);
            }
            // SAFETY: MPI initialised it: the call returned success.
            let request = unsafe { request.assume_init() };
            self.coming.push(Flight { rank, words, request });
            self.next = (at + 1) % self.from.len();
            return Ok(());
        }
        Ok(())
    }

    /// The next message.
    fn receive(&mut self, until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
        let mut turns = 0u32;
        loop {
            self.progress();
            self.probe()?;
            for at in 0..self.coming.len() {
                match test(&mut self.coming[at]) {
                    Ok(false) => {}
                    Ok(true) => {
                        let Flight { rank, words, .. } = self.coming.swap_remove(at);
                        return Ok(Some((rank, words)));
                    }
                    Err(()) => {
                        let Flight { rank, words, .. } = self.coming.swap_remove(at);
                        forget(words);
                        return Err(FabricError::Lost { rank, waited: Duration::ZERO });
                    }
                }
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            turns += 1;
            // An answer either arrives within microseconds, or the rank is computing.
            match turns {
                0..200 => thread::yield_now(),
                200..2000 => thread::sleep(Duration::from_micros(20)),
                _ => thread::sleep(Duration::from_micros(500)),
            }
        }
    }
}

/// The ranks of a world, including the front's own.
struct Processes {
    mail: Mail,
    near: RankStore,
    queue: VecDeque<Vec<u32>>,
}

impl Fabric for Processes {
    fn ranks(&self) -> u32 {
        self.mail.world.ranks
    }

    fn send(&mut self, rank: u32, message: Vec<u32>) -> Result<(), FabricError> {
        if rank == 0 {
            self.queue.push_back(message);
            return Ok(());
        }
        self.mail.send(rank, message)
    }

    fn receive(&mut self, until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
        // The other ranks compute in parallel.
        while let Some(message) = self.queue.pop_front() {
            self.mail.progress();
            if let Some(answer) = self.near.answer(&message) {
                return Ok(Some((0, answer)));
            }
        }
        self.mail.receive(until)
    }

    fn is_remote(&self, rank: u32) -> bool {
        rank != 0
    }

    fn lost(&mut self, rank: u32) {
        self.mail.world.broken.store(true, Ordering::Relaxed);
        self.mail.from.retain(|from| *from != rank);
        self.mail.next = 0;
    }

    fn wants_beat(&self) -> bool {
        self.mail.world.ranks > 1
    }
}
