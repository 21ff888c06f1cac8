//! Applies `patches` to cargo's copy of the sources of candle-transformers, so that the repository needs no copy of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, error, fs};

fn main() -> Result<(), Box<dyn error::Error>> {
    let own = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let sources = sources(&own)?.join("src/models");
    for model in ["llama", "mixtral"] {
        let patch = own.join("patches").join(model).with_extension("patch");
        println!("cargo::rerun-if-changed={}", patch.display());
        let source = fs::read_to_string(sources.join(model).with_extension("rs"))?;
        let patched =
            apply(&source, &fs::read_to_string(&patch)?).map_err(|e| format!("{}: {e}", patch.display()))?;
        // `include!` accepts no `//!` documentation of the file.
        let items: Vec<&str> = patched.lines().filter(|line| !line.starts_with("//!")).collect();
        fs::write(Path::new(&env::var("OUT_DIR")?).join(model).with_extension("rs"), items.join("\n"))?;
    }
    Ok(())
}

/// Folder in which cargo has candle-transformers.
fn sources(own: &Path) -> Result<PathBuf, Box<dyn error::Error>> {
    let mut cargo = Command::new(env::var("CARGO")?);
    // For this platform only: packages of other platforms were not downloaded.
    cargo.args(["metadata", "--format-version=1", "--offline", "--filter-platform"]).arg(env::var("TARGET")?);
    let said = cargo.current_dir(own).output()?;
    if !said.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&said.stderr)).into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&said.stdout)?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let found = packages.find(|of| of["name"] == "candle-transformers");
    let manifest = found.and_then(|of| of["manifest_path"].as_str()).ok_or("no candle-transformers")?;
    Ok(Path::new(manifest).parent().ok_or("a manifest lies in a folder")?.to_owned())
}

/// Applies a unified diff. Its context must match exactly.
fn apply(source: &str, patch: &str) -> Result<String, String> {
    let mut rest = source.lines().enumerate();
    let mut out = Vec::new();
    for line in patch.lines().skip_while(|line| !line.starts_with("@@")) {
        if let Some(place) = line.strip_prefix("@@ -") {
            let first: usize =
                place.split(',').next().and_then(|n| n.parse().ok()).ok_or(format!("not a place: {line}"))?;
            while rest.clone().next().is_some_and(|(at, _)| at + 1 < first) {
                out.extend(rest.next().map(|(_, line)| line));
            }
        } else if let Some(added) = line.strip_prefix('+') {
            out.push(added);
        } else {
            let (at, found) = rest.next().ok_or("the source ends before")?;
            if found != &line[1..] {
                return Err(format!("line {} is {found:?}, expected {:?}", at + 1, &line[1..]));
            }
            if line.starts_with(' ') {
                out.push(found);
            }
        }
    }
    out.extend(rest.map(|(_, line)| line));
    Ok(out.join("\n"))
}
