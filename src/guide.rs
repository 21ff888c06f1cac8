//! The guide: how to use a cache, part by part. Start with the [`tour`].
//!
//! The same pages lie in the folder `docs` of the repository. Their examples are tests.

/// A page of `docs`. Its links to other pages lead to files; the definitions that come first here lead to modules instead.
macro_rules! pages {
    ($($name:ident)*) => {$(
        #[doc = include_str!("guide_links.md")]
        #[doc = include_str!(concat!("../docs/", stringify!($name), ".md"))]
        pub mod $name {}
    )*};
}

pages! {
    tour concepts models codecs eviction routing closed_loop serving planning tiers several_machines cuda costs paper performance
    quality glossary
}
