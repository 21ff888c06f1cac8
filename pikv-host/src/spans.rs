//! Spans and events of the `tracing` crate, with target `pikv`. Without the feature `tracing` the macros expand to nothing and do not
//! evaluate their fields; with it, but without an interested subscriber, each costs a comparison.

/// A span at level debug, from here to the end of the block: `span!("append", layer = layer, rows = self.rows)`.
macro_rules! span {
    ($name:literal $(, $field:ident = $value:expr)* $(,)?) => {
        #[cfg(feature = "tracing")]
        let _span = tracing::debug_span!(target: "pikv", $name $(, $field = $value)*).entered();
    };
}

/// An event at level debug: `event!("moved down", bytes = moved)`.
macro_rules! event {
    ($name:literal $(, $field:ident = $value:expr)* $(,)?) => {
        #[cfg(feature = "tracing")]
        tracing::debug!(target: "pikv", $($field = $value,)* $name);
    };
}
