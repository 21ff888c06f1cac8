//! A running server: the scheduler's thread, and a thread for connections.

use super::connection::Listener;
use super::routes::{Front, router};
use crate::Options;
use crate::model::Model;
use crate::scheduler::{self, Look, Message};
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::{Semaphore, oneshot};

/// A server. Dropping it stops it.
pub struct Server {
    pub address: SocketAddr,
    scheduler: Sender<Message>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server for a model at an address; port 0 picks a free one.
    ///
    /// # Errors
    /// If the cache's configuration is refused or the address cannot be bound.
    pub fn start(model: Arc<Model>, options: Options, address: SocketAddr) -> Result<Server, Box<dyn Error>> {
        let scheduler = scheduler::start(model.clone(), options.clone())?;
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let listener = runtime.block_on(TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        let room = |permits: usize| Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS)));
        // A request that waits for its turn is not a stalled connection.
        let idle = options.deadline + options.deadline / 4;
        let listener = Listener { listener, room: room(options.connections), idle };
        let app = router(Arc::new(Front {
            model,
            scheduler: scheduler.clone(),
            open: room(options.requests),
            requests: Default::default(),
            errors: Default::default(),
            options,
        }));
        let (stop, stopped) = oneshot::channel::<()>();
        let serve = move || {
            runtime.block_on(async {
                // On shutdown, open connections are dropped.
                tokio::select! {
                    _ = axum::serve(listener, app).into_future() => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("http".into()).spawn(serve)?;
        Ok(Server { address, scheduler, stop: Some(stop), thread: Some(thread) })
    }

    /// Memory usage and counts, possibly a moment old.
    pub fn look(&self) -> Option<Arc<Look>> {
        self.ask(Message::Look)
    }

    /// Drops prefixes that no request reads, and returns the usage afterwards.
    pub fn clear_prefixes(&self) -> Option<Arc<Look>> {
        self.ask(Message::Clear)
    }

    fn ask(&self, message: impl FnOnce(oneshot::Sender<Arc<Look>>) -> Message) -> Option<Arc<Look>> {
        let (to, from) = oneshot::channel();
        self.scheduler.send(message(to)).ok()?;
        from.blocking_recv().ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
