//! Ranks in one process: a thread and an arena for each, in host memory or on a device.

use super::{Fabric, RankStore};
use crate::backend::Backend;
use crate::base::error::FabricError;
use crate::base::error::MAX_SHARDS;
use crate::base::error::{ConfigError, Error};
use crate::config::CacheConfig;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A thread for each rank, with its pages in an arena of its own. Messages are moved, not copied. They count as
/// [`Traffic`](super::Traffic) all the same ([`Fabric::is_remote`]): that is what ranks on other machines would send and receive.
#[derive(Debug)]
pub struct InProcess {
    workers: Vec<Worker>,
    answers: Receiver<(u32, Vec<u32>)>,
}

#[derive(Debug)]
struct Worker {
    /// `None` once the thread is to end.
    queue: Option<Sender<Vec<u32>>>,
    thread: Option<JoinHandle<()>>,
}

impl InProcess {
    /// `ranks` threads for a cache of this configuration, each with at most `budget` bytes of pages.
    ///
    /// # Errors
    /// [`ConfigError`] for an invalid configuration, [`FabricError::Nobody`] for no ranks, [`ConfigError::Shards`] for more than the
    /// largest number of shards, [`FabricError::Transport`] if the system starts no thread.
    pub fn new(config: &CacheConfig, ranks: u32, budget: u64) -> Result<InProcess, Error> {
        if ranks > MAX_SHARDS {
            return Err(ConfigError::Shards { shards: ranks }.into());
        }
        let backends = vec![config.backend.clone(); ranks as usize];
        InProcess::on(config, &backends, budget)
    }

    /// A thread for each back end, with at most `budget` bytes of pages there: one for every CUDA device of this host, or any mixture. The
    /// cache itself ([`Cache::over`](crate::Cache::over)) is of the CPU.
    ///
    /// Copies to and from a device pass through pinned host memory: queries and tokens up, partial results of blocks down, and pages that
    /// move down and up again. So devices need no access to each other's memory. One row of 32 query heads of 128 channels over 128K
    /// tokens has 8.5 MB of partial results a layer, which a bus may take longer to copy than the devices to read the pages; with
    /// [`Options::fast`](super::Options::fast) it is 17 KB a device.
    ///
    /// A lost device gives [`FabricError::Device`] once, and then the error of a lost rank.
    ///
    /// # Errors
    /// The same as of [`InProcess::new`].
    ///
    /// ```no_run
    /// # use pikv_host as pikv;
    /// use pikv::Backend;
    /// # use pikv::fabric::{InProcess, Options};
    /// # use pikv::{Cache, CacheConfig};
    /// # fn devices(config: CacheConfig) -> Result<(), Box<dyn std::error::Error>> {
    /// let backends = (0..Backend::cuda_devices()?).map(Backend::cuda_device).collect::<Result<Vec<_>, _>>()?;
    /// let ranks = InProcess::on(&config, &backends, 40 << 30)?;
    /// let cache = Cache::over(config, Box::new(ranks), Options::default())?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn on(config: &CacheConfig, backends: &[Backend], budget: u64) -> Result<InProcess, Error> {
        if backends.is_empty() {
            return Err(FabricError::Nobody.into());
        }
        let (back, answers) = channel();
        let mut workers = Vec::new();
        for (rank, backend) in (0..).zip(backends) {
            let mut store = RankStore::new(&config.clone().backend(backend.clone()), budget)?;
            let (queue, messages) = channel::<Vec<u32>>();
            let back = back.clone();
            let work = move || {
                for message in messages {
                    if let Some(answer) = store.answer(&message)
                        && back.send((rank, answer)).is_err()
                    {
                        return;
                    }
                }
            };
            let thread = thread::Builder::new()
                .name(format!("pikv-rank-{rank}"))
                .spawn(work)
                .map_err(|error| FabricError::Transport(error.to_string()))?;
            workers.push(Worker { queue: Some(queue), thread: Some(thread) });
        }
        Ok(InProcess { workers, answers })
    }
}

impl Fabric for InProcess {
    fn ranks(&self) -> u32 {
        self.workers.len() as u32
    }

    fn send(&mut self, rank: u32, message: Vec<u32>) -> Result<(), FabricError> {
        let queue = self.workers.get(rank as usize).and_then(|worker| worker.queue.as_ref());
        match queue.map(|queue| queue.send(message)) {
            Some(Ok(())) => Ok(()),
            _ => Err(FabricError::Lost { rank, waited: Duration::ZERO }),
        }
    }

    fn receive(&mut self, until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
        match self.answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(answer) => Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(FabricError::Nobody),
        }
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.queue = None;
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // One that panicked returns nothing.
                let _ = thread.join();
            }
        }
    }
}
