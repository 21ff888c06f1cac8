//! Nats against bytes, all rows on one plot.

use crate::Outcome;
use crate::rows::Row;
use plotters::prelude::*;
use std::error::Error;
use std::path::Path;

/// Rows that lose more than this share a line at the top.
const WORST: f64 = 0.5;

pub fn write(
    path: &Path,
    model: &str,
    outcomes: &[(&Row, Outcome)],
    uncompressed: f64,
) -> Result<(), Box<dyn Error>> {
    let root = SVGBackend::new(path, (1100, 700)).into_drawing_area();
    root.fill(&WHITE)?;
    let shown: Vec<(&Row, f64, f64)> = outcomes
        .iter()
        .map(|(row, o)| (*row, 100.0 / o.ratio, (o.nats - uncompressed).clamp(1e-6, WORST)))
        .collect();
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("{model}: nats a token lost, against bytes"), ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(80)
        .build_cartesian_2d(20.0..210.0, (5e-7..WORST * 1.5).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("packed bytes, % of bf16")
        .y_desc(format!("nats lost (1e-6: none or a gain; {WORST}: that or more)"))
        .y_label_formatter(&|y| format!("{y:.0e}"))
        .draw()?;
    chart
        .draw_series(LineSeries::new([(20.0, 1e-6), (210.0, 1e-6)], BLACK.stroke_width(1)))?
        .label("uncompressed");
    chart.draw_series([Text::new(
        format!("uncompressed: {uncompressed:.4}"),
        (150.0, 1.2e-6),
        ("sans-serif", 13),
    )])?;
    for (i, (row, x, y)) in shown.iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        chart.draw_series([Circle::new((*x, *y), 4, color.filled())])?;
        // Names to the right, every other one a little lower, so that neighbours can be told apart.
        let shift = if i % 2 == 0 { 1.0 } else { 0.86 };
        chart.draw_series([Text::new(
            row.name.clone(),
            (x + 1.0, y * shift),
            ("sans-serif", 12).into_font().color(&color),
        )])?;
    }
    root.present()?;
    Ok(())
}
