//! Spans and events of the `tracing` crate.

use super::cache_of;
use pikv::{Attend, CacheConfig, Dtype, LayerShape, Output};
use std::io::Write;
use std::sync::{Arc, Mutex};
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

#[test]
fn a_step_tells_what_it_does() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_span_events(FmtSpan::CLOSE)
        .with_ansi(false)
        .without_time()
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let layers = vec![LayerShape::new(1, 1, 4, Dtype::F32); 2];
        let (cache, mut sequence) = cache_of(CacheConfig::new(layers, 1 << 20).ring(32).rollback(4));
        let mut step = cache.begin([(&mut sequence, 3)]).unwrap();
        for layer in 0..2 {
            step.append(layer, &[0.5; 12], &[0.5; 12]).unwrap();
            step.attend(layer, &[0.5; 12], &Attend::new(0.5), Output::new(&mut [0.0; 12])).unwrap();
        }
        step.commit().unwrap();
        sequence.rollback(2).unwrap();
    });
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    println!("{log}");
    let lines: Vec<&str> = log.lines().map(|line| line.trim().trim_start_matches("DEBUG ")).collect();
    let starts = [
        "begin: pikv: begun sequences=1 rows=3 layers=2 bytes=",
        "begin: pikv: close",
        "append{layer=0 rows=3}: pikv: close",
        "attend{layer=0 rows=3}: pikv: close",
        "append{layer=1 rows=3}: pikv: close",
        "attend{layer=1 rows=3}: pikv: close",
        "commit{sequences=1 rows=3}: pikv: close",
        "rollback{tokens=2 from=3}: pikv: close",
    ];
    assert_eq!(lines.len(), starts.len(), "{log}");
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(start), "{line}");
    }
}
