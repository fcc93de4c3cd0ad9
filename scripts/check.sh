#!/usr/bin/env bash
# Everything that can be checked without an engine. Usage: scripts/check.sh PYTHON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=${1:?usage: scripts/check.sh PYTHON}

failed=()
step() {
    local name=$1
    shift
    printf '[check] %s\n' "$name"
    "$@" || failed+=("$name")
}

step "ruff check" "$py" -m ruff check .
step "ruff format" "$py" -m ruff format --check --diff --quiet .
step "mypy" "$py" -m mypy
step "import contracts" "$py" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo
step "tidy" "$py" -m pytest tests/test_tidy.py -q

if ((${#failed[@]})); then
    printf '[check] FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
printf '[check] all good\n'
