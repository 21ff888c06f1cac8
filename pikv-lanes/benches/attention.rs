//! Attention of four query rows over blocks of pages in one form, so that its instructions can be counted.
//!
//! `cargo bench -p pikv-lanes --bench attention -- LANES FORM BLOCKS` prints the bytes of the pages and the bits of the results.
//! `benches/instructions/run` counts the instructions of two runs that differ in `BLOCKS`.

#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../tests/pages/mod.rs"]
mod pages;

use pages::{Form, Pages, bits};
use pikv_lanes::Lanes;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|x| x != "--bench").collect();
    let [lanes, form, blocks] = &arguments[..] else {
        eprintln!("usage: attention LANES FORM BLOCKS");
        return;
    };
    let lanes = Lanes::by_name(lanes).unwrap();
    let form = Form::all().find(|x| x.name() == form).unwrap();
    let pages = Pages::new(form, lanes);
    let blocks = blocks.parse().unwrap();
    println!("{} {:#018x}", blocks * pages.bytes(), bits(&pages.attend(lanes, 4, blocks)));
}
