#!/usr/bin/env bash
# All tests, as two runs side by side: what starts real engines mostly waits, the rest mostly computes.
# usage: scripts/test.sh PYTHON [PYTEST ARGUMENTS]; with a path among them it is one run of that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
shift

for word in "$@"; do
    if [[ $word != -* && -e ${word%%::*} ]]; then
        exec "$python" -m pytest "$@"
    fi
done

engines=(tests/engines/vllm/e2e tests/bench tests/cli tests/examples)
printed=$(mktemp)
others=
end() {
    if [[ -n $others ]] && kill -0 "$others" 2>/dev/null; then
        kill -INT "$others" || true
        wait "$others" || true
    fi
    rm -f "$printed"
}
trap end EXIT

echo "[test] two runs: ${engines[*]}, and beside it all others, whose output follows"
"$python" -m pytest -o cache_dir=.pytest_cache/others "${engines[@]/#/--ignore=}" "$@" \
    >"$printed" 2>&1 &
others=$!
status=0
"$python" -m pytest "${engines[@]}" "$@" || status=$?
other_status=0
wait "$others" || other_status=$?
others=
cat "$printed"
# 5: no test of that run was asked for (-k, -m).
if ((status == 5)); then
    status=$other_status
elif ((other_status == 5)); then
    other_status=0
fi
exit $((status ? status : other_status))
