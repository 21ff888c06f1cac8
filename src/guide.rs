//! The guide: how to use a cache, part by part. Start with the [`tour`].
//!
//! The pages are those of the folder `docs` in the repository. Their examples are tests.

/// A page of `docs`. In the files, links to other pages name files; the definitions included first make them name modules here.
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
