//! Connections: limited in number, and closed when idle.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// Accepts connections up to the limit; others wait in the system's queue.
pub struct Listener {
    pub listener: TcpListener,
    pub room: Arc<Semaphore>,
    /// Longest idle time: a client that stalls while it sends or reads is disconnected.
    pub idle: Duration,
}

impl axum::serve::Listener for Listener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            // The semaphore is never closed.
            let permit = self.room.clone().acquire_owned().await.ok();
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    // Send each token at once.
                    let _ = stream.set_nodelay(true);
                    let timer = Box::pin(sleep(self.idle));
                    let (idle, asking) = (self.idle, false);
                    return (Connection { stream, timer, idle, asking, _permit: permit }, address);
                }
                // For example too many open files: wait until some are closed.
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails after a time without progress.
pub struct Connection {
    stream: TcpStream,
    timer: Pin<Box<Sleep>>,
    idle: Duration,
    /// Whether a request was read in part, and nothing was written since.
    asking: bool,
    _permit: Option<OwnedSemaphorePermit>,
}

type Moved<T> = Poll<io::Result<T>>;

impl Connection {
    /// Result of a read or a write; [`io::ErrorKind::TimedOut`] if it waited too long. A request that is sent byte by byte is no progress:
    /// it has the idle time in all.
    fn moved<T>(&mut self, context: &mut Context<'_>, poll: Moved<T>, written: bool) -> Moved<T> {
        if poll.is_ready() {
            if written || !self.asking {
                self.timer.as_mut().reset(Instant::now() + self.idle);
            }
            self.asking = !written;
            return poll;
        }
        ready!(self.timer.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Moved<()> {
        let poll = Pin::new(&mut self.stream).poll_read(context, to);
        self.moved(context, poll, false)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Moved<usize> {
        let poll = Pin::new(&mut self.stream).poll_write(context, from);
        self.moved(context, poll, true)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Moved<()> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Moved<()> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
