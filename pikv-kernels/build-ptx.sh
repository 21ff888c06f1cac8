#!/usr/bin/env bash
# Compiles the kernels to PTX: build-ptx.sh [OUT], by default into ptx/ beside this script, with a manifest.
# Needs Debian's rustc-web and rust-web-src (or RUSTC set to a nightly with rust-src).
set -euo pipefail
cd "$(dirname "$0")"
out=$(realpath -m "${1:-ptx}")
mkdir -p "$out"
export RUSTC=${RUSTC:-/usr/bin/rustc} RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-../target}/ptx
# JumpThreading copies convergent calls into divergent branches (rust-lang/rust#137086). Loops over register arrays must unroll.
# A chain of comparisons, the same in all lanes, beats a jump through a table.
flags="-C linker=/bin/true -Zunstable-options -Cpanic=immediate-abort -Zmir-enable-passes=-JumpThreading -C llvm-args=-unroll-threshold=5000 -Cjump-tables=no"
profile=(--config 'profile.release.lto="fat"' --config profile.release.codegen-units=1
  --config 'profile.release.panic="abort"' --config profile.release.debug=false)
# For later devices the compiler writes the same instructions.
CARGO_TARGET_NVPTX64_NVIDIA_CUDA_RUSTFLAGS="-C target-cpu=sm_70 $flags" \
  cargo rustc --locked --release -p pikv-kernels --lib --crate-type cdylib --target nvptx64-nvidia-cuda \
  -Zbuild-std=core "${profile[@]}" -- --emit=asm
cp "$CARGO_TARGET_DIR/nvptx64-nvidia-cuda/release/deps/pikv_kernels.s" "$out/pikv_sm_70.ptx"
{
  echo "compiler $("$RUSTC" --version)"
  echo "flags $flags"
  echo "inputs $(./ptx-inputs.sh)"
  echo "pikv_sm_70.ptx $(sha256sum "$out/pikv_sm_70.ptx" | cut -d' ' -f1)"
} > "$out/manifest.txt"
