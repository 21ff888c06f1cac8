//! Spans and events of the `tracing` crate.

use super::cache_of;
use super::log::logged;
use pikv::{Attend, AttendOutput, CacheConfig, Dtype, LayerShape};
use tracing::Level;
use tracing_subscriber::fmt::format::FmtSpan;

#[test]
fn a_step_tells_what_it_does() {
    let lines = logged(Level::DEBUG, FmtSpan::CLOSE, || {
        let layers = vec![LayerShape::new(1, 1, 4, Dtype::F32); 2];
        let (cache, mut sequence) = cache_of(CacheConfig::new(layers, 1 << 20).ring(32).rollback(4));
        let mut step = cache.begin([(&mut sequence, 3)]).unwrap();
        for layer in 0..2 {
            step.append(layer, &[0.5; 12], &[0.5; 12]).unwrap();
            step.attend(layer, &[0.5; 12], &Attend::new(0.5), AttendOutput::new(&mut [0.0; 12])).unwrap();
        }
        step.commit().unwrap();
        sequence.rollback(2).unwrap();
    });
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
    assert_eq!(lines.len(), starts.len(), "{lines:#?}");
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(&format!("DEBUG {start}")), "{line}");
    }
}
