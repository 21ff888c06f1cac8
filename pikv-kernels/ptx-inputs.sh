#!/usr/bin/env bash
# Prints the hash of all that the PTX is made from: sources of the two crates without lines of comments, the build script, and the versions
# of what they depend on.
set -euo pipefail
cd "$(dirname "$0")/.."
files=$(git ls-files 'pikv-core/src/*.rs' 'pikv-kernels/src/*.rs' pikv-core/Cargo.toml pikv-kernels/Cargo.toml pikv-kernels/build-ptx.sh | LC_ALL=C sort)
{
  cat $files | sed -E '/^[[:space:]]*\/\//d'
  cargo tree --locked -p pikv-kernels -e normal,build --prefix none --no-dedupe --format '{p}' | sed 's/ (.*//' | LC_ALL=C sort -u
} | sha256sum | cut -d' ' -f1
