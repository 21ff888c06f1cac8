//! Nats lost, policy by policy, router by router and budget by budget.

use crate::Outcome;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::error::Error;
use std::path::Path;

pub(crate) fn write(
    path: &Path,
    model: &str,
    outcomes: &[Outcome],
    reference: f64,
) -> Result<(), Box<dyn Error>> {
    // What holds everything does so at every budget, and was run once.
    let bounded = |o: &&Outcome| o.policy != "none";
    let unique = |of: &dyn Fn(&Outcome) -> String, all: bool| {
        let mut names: Vec<String> = Vec::new();
        outcomes.iter().filter(|o| all || bounded(o)).map(of).for_each(|name| {
            if !names.contains(&name) {
                names.push(name);
            }
        });
        names
    };
    let policies = unique(&|o| o.policy.clone(), true);
    let columns = unique(&|o| format!("{} {}", o.budget, o.router), false);
    let (left, top, width, height) = (150, 110, 46, 26);
    let size =
        ((left + width * columns.len() as u32 + 40).max(560), top + height * policies.len() as u32 + 40);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    root.draw(&Text::new(model.to_owned(), (14, 12), ("sans-serif", 18)))?;
    let told =
        format!("nats a token more than with everything held and read ({reference:.4}), in thousandths");
    root.draw(&Text::new(told, (14, 36), ("sans-serif", 13)))?;
    let centre = |color: RGBColor| {
        ("sans-serif", 11).into_font().color(&color).pos(Pos::new(HPos::Center, VPos::Center))
    };
    for (c, column) in columns.iter().enumerate() {
        let x = (left + width * c as u32 + width / 2) as i32;
        let (budget, router) = column.split_once(' ').unwrap_or((column, ""));
        root.draw(&Text::new(router.to_owned(), (x, top as i32 - 14), centre(BLACK)))?;
        root.draw(&Text::new(budget.to_owned(), (x, top as i32 - 32), centre(BLACK)))?;
    }
    root.draw(&Text::new("budget, tokens", (14, top as i32 - 38), ("sans-serif", 12)))?;
    root.draw(&Text::new("router", (14, top as i32 - 20), ("sans-serif", 12)))?;
    // Worse by a factor of e is a step of the same size everywhere.
    let shade = |delta: f64| ((delta * 1000.0).max(0.0).ln_1p() / 6.0).min(1.0);
    for (r, policy) in policies.iter().enumerate() {
        let y = (top + height * r as u32) as i32;
        root.draw(&Text::new(policy.clone(), (14, y + 6), ("sans-serif", 14)))?;
        for (c, column) in columns.iter().enumerate() {
            let of = |o: &&Outcome| {
                let there = format!("{} {}", o.budget, o.router) == *column;
                o.policy == *policy && (there || !bounded(o) && column.ends_with(&format!(" {}", o.router)))
            };
            let Some(o) = outcomes.iter().find(of) else { continue };
            let x = (left + width * c as u32) as i32;
            let (delta, s) = (o.nats - reference, shade(o.nats - reference));
            let color =
                RGBColor((255.0 - 60.0 * s) as u8, (245.0 - 205.0 * s) as u8, (235.0 - 215.0 * s) as u8);
            let cell = [(x, y), (x + width as i32 - 1, y + height as i32 - 1)];
            root.draw(&Rectangle::new(cell, color.filled()))?;
            let ink = if s > 0.6 { WHITE } else { BLACK };
            let at = (x + width as i32 / 2, y + height as i32 / 2);
            root.draw(&Text::new(format!("{:.1}", delta * 1000.0), at, centre(ink)))?;
        }
    }
    root.present()?;
    Ok(())
}
