//! Events and spans of the `tracing` crate, as lines of text.

use std::io::Write;
use std::sync::{Arc, Mutex};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Level};
use tracing_subscriber::fmt::format::FmtSpan;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The lines that events of `level` and below, and spans that close, write while `run` runs on this thread.
///
/// With a single subscriber alive, `tracing` asks only the subscriber of the thread that first reaches an event or span whether it is
/// enabled: a test on another thread, without a subscriber, would disable it here too. With two subscribers it asks both.
pub(crate) fn logged(level: Level, spans: FmtSpan, run: impl FnOnce()) -> Vec<String> {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_span_events(spans)
        .with_ansi(false)
        .without_time()
        .with_writer(move || writer.clone())
        .finish();
    let wants = Dispatch::new(subscriber);
    let _second = Dispatch::new(NoSubscriber::default());
    tracing::dispatcher::with_default(&wants, run);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    text.lines().map(|line| line.trim().to_string()).collect()
}
