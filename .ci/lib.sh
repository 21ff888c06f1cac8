# What .ci/run and .ci/full share: named steps whose times go to target/ci-times.csv.
. .ci/apt.sh

# Each thing is compiled once here: what makes a second build of it faster makes the first one slower.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0

times=target/ci-times.csv
mkdir -p target
echo "step,seconds,cpu_seconds" > $times

# step NAME COMMAND..: runs it, stops the script where it fails, and adds its wall and CPU seconds (children included) to the table.
step() {
  local name=$1 from=$SECONDS before
  shift
  printf '\n== %s\n' "$name"
  cpu
  before=$used
  "$@"
  cpu
  echo "\"$name\",$((SECONDS - from)),$((used - before))" >> $times
}

# Puts the CPU seconds of this shell and of its children that have ended in `used`. (Not printed: a subshell would count its own.)
cpu() {
  times > target/cpu
  used=$(awk '{ for (i = 1; i <= 2; i++) { split($i, t, /[ms]/); s += t[1] * 60 + t[2] } } END { printf "%.0f", s }' target/cpu)
}

# The table of steps, and the sum.
table() {
  printf '\n'
  sed -n 's/^"\(.*\)",\([0-9]*\),\([0-9]*\)$/\1\t\2\t\3/p' $times | awk -F'\t' '
    BEGIN { printf "%-72s %8s %8s\n", "step", "s", "CPU s" }
    { printf "%-72s %8d %8d\n", $1, $2, $3; s += $2; c += $3 }
    END { printf "%-72s %8d %8d\n", "all", s, c }'
}

# The bits of the CPU's decode from the CUDA back end over the stand-in: the profile that it was built with, and so many tokens.
standin_decode() {
  PIKV_LIBCUDA=$PWD/target/$1/deps/libpikv_standin.so target/$1/decode --tokens "$2" --backend cuda | tee target/written
  diff target/written <(target/$1/decode --tokens "$2" --backend cpu)
}

# A rank on each of three devices, after a prompt of so many bytes.
standin_ranks() {
  PIKV_LIBCUDA=$PWD/target/$1/deps/libpikv_standin.so PIKV_STANDIN_DEVICES=3 \
    target/$1/distributed --backend cuda --prompt "$2" --tokens 2 --stream 0
}

# release BENCH..: examples, the stand-in and these benches, with one set of features, so that nothing is built twice.
release() {
  cargo build --release -p decode -p serve -p pikv-examples -p pikv-benches -p pikv-standin --lib --bins \
    "${@/#/--bench=}" --features decode/cuda,pikv-examples/cuda
}

# built NAME ARGUMENT..: runs a bench that `release` built. (Cargo would build it again, with the features of its package alone.)
built() {
  local name=$1
  shift
  "$(ls -t target/release/deps/"$name"-* | grep -v '\.d$' | head -1)" "$@"
}
