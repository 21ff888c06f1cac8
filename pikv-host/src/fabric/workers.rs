//! Ranks in one process: a thread and an arena for each.

use super::{Fabric, FabricError, Store};
use crate::config::CacheConfig;
use crate::error::Error;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A thread for each rank, with its pages in an arena of its own. Messages are handed over, not copied.
#[derive(Debug)]
pub struct InProcess {
    workers: Vec<Worker>,
    answers: Receiver<(u32, Vec<u32>)>,
}

#[derive(Debug)]
struct Worker {
    /// `None` once it is told to end.
    queue: Option<Sender<Vec<u32>>>,
    thread: Option<JoinHandle<()>>,
}

impl InProcess {
    /// `ranks` threads for a cache of this configuration, each with at most `budget` bytes of pages.
    ///
    /// # Errors
    /// What is wrong with the configuration; [`FabricError::Nobody`] for no ranks, [`FabricError::Transport`] if the system starts no
    /// thread.
    pub fn new(config: &CacheConfig, ranks: u32, budget: u64) -> Result<InProcess, Error> {
        if ranks == 0 {
            return Err(FabricError::Nobody.into());
        }
        let (back, answers) = channel();
        let mut workers = Vec::new();
        for rank in 0..ranks {
            let mut store = Store::new(config, budget)?;
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
                // One that panicked has nothing to give back.
                let _ = thread.join();
            }
        }
    }
}
