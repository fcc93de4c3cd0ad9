#!/usr/bin/env bash
# Run every benchmark. Usage: scripts/bench.sh PYTHON [arguments for each]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=${1:?usage: scripts/bench.sh PYTHON [ARGUMENTS]}
shift

shopt -s nullglob
num_run=0
for file in bench/[!_]*.py; do
    printf '[bench] %s\n' "$file"
    "$py" "$file" "$@"
    num_run=$((num_run + 1))
done
printf '[bench] %d benchmarks run\n' "$num_run"
