//! Large fabrics, simulated: the page map and the messages of a decode step are replayed without data, for 8 to 1024 devices.
//!
//! `cargo run --release -p pikv-examples --bin scale` writes `benches/results/scale.csv`, `scale.svg` and `maps.csv`, and prints the rows of one model.
//!
//! A row is a model of the planner, a context and a number of devices (4K tokens on up to 64 devices only). It has
//!
//! * the bytes of pages on the fullest device, alone and divided by the mean (0 if no page is full), and on the front;
//! * the bytes and messages of a decode step of one row that reads all pages, with the bits of one process and merged on the ranks;
//! * the time that the front's link takes for them at its rated speed, in both directions at once and without other load: 450 GB/s each
//!   way for NVLink (fourth generation, 18 links of 25 GB/s), 50 GB/s for 400G.
//!
//! Experts are even, K and V bf16, the map `ShardMap::spread`. The message sizes are tested on 2, 4 and 8 ranks (`tests/fabric`,
//! `tests/mpi.rs`: within 5 %); the times are not measured.

use pikv::Dtype;
use pikv::fabric::{RankPlan, Schedule, Wire};
use pikv::planner::Geometry;
use pikv::shard::{ShardError, ShardMap};
use pikv_engine::measure::results::{self, Sheet};
use plotters::prelude::*;
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;

const DEVICES: [u32; 8] = [8, 16, 32, 64, 128, 256, 512, 1024];
const CONTEXTS: [(u32, &str); 4] =
    [(128 << 10, "128K"), (512 << 10, "512K"), (1 << 20, "1M"), (10_000_000, "10M")];
/// A context with few full pages, and the most devices that it is spread over.
const SHORT: (u32, u32) = (4 << 10, 64);
/// Links, and their bytes a second each way.
const LINKS: [(&str, f64); 2] = [("NVLink", 450e9), ("400G", 50e9)];
const RING: u32 = 256;

struct Row {
    model: &'static str,
    context: u32,
    devices: u32,
    fullest: u64,
    of_mean: f64,
    front: u64,
    exact: Wire,
    fast: Wire,
}

/// Seconds that a link needs for the bytes of both directions at once.
fn seconds(wire: &Wire, rate: f64) -> f64 {
    wire.sent.max(wire.received) / rate
}

fn row(geometry: &Geometry, context: u32, devices: u32) -> Result<Row, Box<dyn Error>> {
    let map = ShardMap::spread(devices)?;
    let config = geometry.config(Dtype::Bf16, Dtype::Bf16, 1 << 40).ring(RING).sinks(4).shards(map);
    let filed = context - RING - 4;
    let even = |e: u32| filed / geometry.experts + u32::from(e < filed % geometry.experts);
    let filed: Vec<u32> = (0..geometry.experts).map(even).collect();
    let schedule =
        Schedule::new(&config, devices, &filed, |t, e, head| map.shard(u64::from(t), u32::from(e), head))?;
    let sum = |of: fn(&RankPlan) -> Wire| schedule.ranks.iter().map(of).sum();
    let fullest = schedule.ranks.iter().map(|rank| rank.bytes).max().unwrap_or(0);
    let all: u64 = schedule.ranks.iter().map(|rank| rank.bytes).sum();
    Ok(Row {
        model: geometry.name,
        context,
        devices,
        fullest,
        of_mean: fullest as f64 * f64::from(devices) / all.max(1) as f64,
        front: schedule.front,
        exact: sum(|rank| rank.exact),
        fast: sum(|rank| rank.fast),
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut rows = Vec::new();
    for geometry in Geometry::ALL {
        for devices in DEVICES.into_iter().filter(|devices| *devices <= SHORT.1) {
            rows.push(row(&geometry, SHORT.0, devices)?);
        }
        for (context, _) in CONTEXTS {
            for devices in DEVICES {
                rows.push(row(&geometry, context, devices)?);
            }
        }
    }
    let columns = "model,context,devices,bytes_fullest,of_mean,bytes_front,exact_sent,exact_received,exact_messages,fast_sent,\
                   fast_received,fast_messages,exact_ms_nvlink,exact_ms_400g,fast_ms_nvlink,fast_ms_400g";
    let mut sheet = Sheet::new(results::file("scale.csv"), columns, "scale")?;
    for row in &rows {
        let mut csv = String::new();
        let Row { model, context, devices, fullest, of_mean, front, exact, fast } = row;
        write!(csv, "{model},{context},{devices},{fullest},{of_mean:.4},{front}")?;
        for wire in [exact, fast] {
            write!(csv, ",{:.0},{:.0},{:.1}", wire.sent, wire.received, wire.messages)?;
        }
        for wire in [exact, fast] {
            for (_, rate) in LINKS {
                write!(csv, ",{:.4}", 1e3 * seconds(wire, rate))?;
            }
        }
        sheet.row(&csv)?;
    }
    write_maps()?;
    plot(&results::file("scale.svg"), &rows)?;
    println!(
        "{:>8} {:>8} {:>12} {:>8} {:>10} {:>10} {:>12} {:>12} {:>10}",
        "context",
        "devices",
        "GB fullest",
        "of mean",
        "MB exact",
        "MB fast",
        "ms, NVLink",
        "ms, 400G",
        "fast, 400G"
    );
    for row in rows.iter().filter(|row| row.model == Geometry::ALL[0].name) {
        println!(
            "{:>8} {:>8} {:>12.3} {:>8.3} {:>10.2} {:>10.2} {:>12.3} {:>12.3} {:>10.3}",
            row.context,
            row.devices,
            row.fullest as f64 / 1e9,
            row.of_mean,
            (row.exact.sent + row.exact.received) / 1e6,
            (row.fast.sent + row.fast.received) / 1e6,
            1e3 * seconds(&row.exact, LINKS[0].1),
            1e3 * seconds(&row.exact, LINKS[1].1),
            1e3 * seconds(&row.fast, LINKS[1].1),
        );
    }
    println!(
        "\n{} (one of {} models; all in benches/results/scale.csv)",
        Geometry::ALL[0].name,
        Geometry::ALL.len()
    );
    Ok(())
}

/// Maps from blocks to devices; an error where a map does not exist for these experts and devices.
fn maps(experts: u32, devices: u32) -> [(&'static str, Result<ShardMap, ShardError>); 4] {
    [
        ("paper: block xor expert", ShardMap::xor(devices.max(experts), experts, devices)),
        ("whole experts", ShardMap::xor(1, experts, devices)),
        ("sum", ShardMap::sum(devices)),
        ("spread", ShardMap::spread(devices)),
    ]
}

/// Bytes of pages on the fullest device, alone and over the mean, under each map: with even experts, and with one that has half the tokens.
fn write_maps() -> Result<(), Box<dyn Error>> {
    let columns = "model,context,devices,map,experts,bytes_fullest,of_mean,devices_without";
    let mut sheet = Sheet::new(results::file("maps.csv"), columns, "scale")?;
    for geometry in Geometry::ALL {
        let (name, experts) = (geometry.name, geometry.experts);
        for (context, devices) in DEVICES.into_iter().flat_map(|g| [(SHORT.0, g), (CONTEXTS[0].0, g)]) {
            let tokens = context - RING - 4;
            let even = |e: u32| tokens / experts + u32::from(e < tokens % experts);
            let rest = tokens - tokens / 2;
            let uneven = |e: u32| match e {
                0 => tokens / 2,
                _ => rest / (experts - 1) + u32::from(e <= rest % (experts - 1)),
            };
            for (loads, filed) in [
                ("even", (0..experts).map(even).collect::<Vec<u32>>()),
                ("half to one", (0..experts).map(uneven).collect()),
            ] {
                for (called, map) in maps(experts, devices) {
                    let Ok(map) = map else { continue };
                    let config = geometry.config(Dtype::Bf16, Dtype::Bf16, 1 << 40).ring(RING).sinks(4);
                    let plan = Schedule::new(&config.shards(map), devices, &filed, |t, e, head| {
                        map.shard(u64::from(t), u32::from(e), head)
                    })?;
                    let bytes: Vec<u64> = plan.ranks.iter().map(|rank| rank.bytes).collect();
                    let (most, all) = (bytes.iter().max().unwrap_or(&0), bytes.iter().sum::<u64>().max(1));
                    let without = bytes.iter().filter(|bytes| **bytes == 0).count();
                    let of_mean = *most as f64 * f64::from(devices) / all as f64;
                    sheet.row(&format!(
                        "{name},{context},{devices},{called},{loads},{most},{of_mean:.4},{without}"
                    ))?;
                }
            }
        }
    }
    Ok(())
}

/// Plots milliseconds of the front's 400G link over the number of devices, for one model.
fn plot(path: &Path, rows: &[Row]) -> Result<(), Box<dyn Error>> {
    let model = Geometry::ALL[0].name;
    let root = SVGBackend::new(path, (900, 560)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("{model}: a decode step on the front's 400G link"), ("sans-serif", 22))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d((7f64..1200f64).log_scale(), (0.01f64..2000f64).log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("devices")
        .y_desc("ms, if the link alone counts")
        .draw()?;
    for (i, (context, name)) in CONTEXTS.iter().enumerate() {
        let colour = HSLColor(i as f64 * 0.22, 0.75, 0.4);
        let of = |wire: fn(&Row) -> &Wire| {
            let rows = rows.iter().filter(move |row| row.model == model && row.context == *context);
            rows.map(move |row| (f64::from(row.devices), 1e3 * seconds(wire(row), LINKS[1].1)))
                .collect::<Vec<_>>()
        };
        let exact = of(|row| &row.exact);
        chart
            .draw_series(LineSeries::new(exact, colour.stroke_width(2)))?
            .label(format!("{name}, bits of one process"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        let fast = of(|row| &row.fast);
        chart
            .draw_series(fast.iter().map(|at| Circle::new(*at, 4, colour.filled())))?
            .label(format!("{name}, merged on the ranks"))
            .legend(move |(x, y)| Circle::new((x + 9, y), 4, colour.filled()));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    root.present()?;
    Ok(())
}
