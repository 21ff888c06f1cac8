//! Nats against bytes, all rows on one plot. A circle that would hide another is drawn above its place (below it at the edge), on a line
//! from there.

use crate::Outcome;
use crate::rows::Row;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::error::Error;
use std::path::Path;

/// Nats per token above the uncompressed line at which the plot ends; worse rows are drawn on that edge.
const EDGE: f64 = 0.03;

pub fn write(
    path: &Path,
    model: &str,
    outcomes: &[(&Row, Outcome)],
    uncompressed: f64,
) -> Result<(), Box<dyn Error>> {
    let root = SVGBackend::new(path, (1200, 80 + 26 * outcomes.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, legend) = root.split_horizontally(760);
    let least = outcomes.iter().map(|(_, o)| o.nats).fold(uncompressed, f64::min);
    let (low, high) = (least - 0.002, uncompressed + EDGE);
    // Space for the circles on the edge.
    let top = high + 0.001;
    let mut chart = ChartBuilder::on(&left)
        .caption(format!("{model}: nats a token against bytes"), ("sans-serif", 22))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(10.0..110.0, low..top)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("packed bytes, % of bf16")
        .y_desc(format!("nats a token; the top edge is {EDGE} above the uncompressed line, or worse"))
        .draw()?;
    chart
        .draw_series(LineSeries::new([(10.0, uncompressed), (110.0, uncompressed)], BLACK.stroke_width(2)))?;
    legend.draw(&PathElement::new([(5, 50), (23, 50)], BLACK.stroke_width(2)))?;
    legend.draw(&Text::new(
        format!("f32, nothing packed: {uncompressed:.4}"),
        (30, 43),
        ("sans-serif", 14),
    ))?;
    // Of a circle, in the units of the axes.
    let (width, height) = (17.0 / 6.6, 17.0 / (root.dim_in_pixel().1 as f64 - 110.0) * (top - low));
    let mut placed: Vec<(f64, f64)> = Vec::new();
    let centre = ("sans-serif", 10).into_font().color(&WHITE).pos(Pos::new(HPos::Center, VPos::Center));
    // f32 itself is the line.
    for (i, (row, o)) in outcomes.iter().enumerate().filter(|(_, (row, _))| row.name != "f32") {
        // Few hues, so that all are dark enough for the number.
        let color = HSLColor((i as f64 * 0.381_966).fract(), 0.75, 0.36);
        let at = (100.0 / o.ratio, o.nats.min(high));
        let mut place = at;
        let hides = |other: &(f64, f64), place: (f64, f64)| {
            ((other.0 - place.0) / width).powi(2) + ((other.1 - place.1) / height).powi(2) < 1.0
        };
        while placed.iter().any(|other| hides(other, place)) {
            // From the edge down.
            place.1 += if at.1 < high { height / 4.0 } else { -height / 4.0 };
        }
        if place != at {
            chart.draw_series([PathElement::new([at, place], color.stroke_width(1))])?;
            chart.draw_series([Circle::new(at, 2, color.filled())])?;
        }
        placed.push(place);
        chart.draw_series([Circle::new(place, 9, color.filled())])?;
        chart.draw_series([Text::new(i.to_string(), place, centre.clone())])?;
        let y = 50 + 26 * i as i32;
        legend.draw(&Circle::new((14, y), 9, color.filled()))?;
        legend.draw(&Text::new(i.to_string(), (14, y), centre.clone()))?;
        let line = format!("{} {} ({:+.4})", row.id, row.name, o.nats - uncompressed);
        legend.draw(&Text::new(line, (30, y - 7), ("sans-serif", 14)))?;
    }
    root.present()?;
    Ok(())
}
