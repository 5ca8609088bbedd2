# Functions of the scripts in this folder, to be sourced.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The exit codes that the scripts use, as muster's programs do.
readonly exit_usage=64 exit_missing=69 exit_retry=75

say() { printf '%s\n' "$*"; }
fail() {  # fail CODE SENTENCE
  local code=$1
  shift
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit "$code"
}

# Lets Open MPI start as root and with more ranks than cores, and keeps it from pinning a rank to one core.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none

# The number of compilers to run at once, by cores and memory: a file that includes libtorch needs 1.5 GB.
jobs() {
  local by_memory cores
  by_memory=$(awk '/^MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
  cores=$(nproc)
  say $((by_memory < 1 ? 1 : by_memory < cores ? by_memory : cores))
}

# build [TARGET…]: builds with $preset, `release` unless it is set; configures only where that was not done.
build() {
  cd "$root"
  preset=${preset:-release}
  [ -f "build/$preset/build.ninja" ] || cmake --preset "$preset"
  ninja -C "build/$preset" -j "$(jobs)" "$@"
}
