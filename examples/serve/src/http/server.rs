//! A server that runs: the scheduler's thread, and one for connections.

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

/// A server. It stops when it is dropped.
pub struct Server {
    pub address: SocketAddr,
    scheduler: Sender<Message>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server of a model at an address; port 0 takes one that is free.
    ///
    /// # Errors
    /// A cache's configuration that is refused; an address that cannot be had.
    pub fn start(model: Arc<Model>, options: Options, address: SocketAddr) -> Result<Server, Box<dyn Error>> {
        let scheduler = scheduler::start(model.clone(), options.clone())?;
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let listener = runtime.block_on(TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        let room = |permits: usize| Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS)));
        // A request that waits for its turn is no stalled one.
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
                // Open connections are cut off.
                tokio::select! {
                    _ = axum::serve(listener, app).into_future() => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("http".into()).spawn(serve)?;
        Ok(Server { address, scheduler, stop: Some(stop), thread: Some(thread) })
    }

    /// Where bytes are, perhaps a moment ago.
    pub fn look(&self) -> Option<Arc<Look>> {
        self.ask(Message::Look)
    }

    /// Forgets prefixes that no request reads, and says where bytes are then.
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
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
