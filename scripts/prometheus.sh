#!/usr/bin/env bash
# Puts a Prometheus server where the test of the dashboard finds it. Usage: scripts/prometheus.sh FOLDER
#
# One that is installed is used. Otherwise Debian's package is fetched with apt and unpacked into FOLDER:
# nothing is installed or started, and nobody has to be root. Without apt, or without its index, the
# test is skipped and says so; that is no error.
set -euo pipefail
folder=${1:?usage: scripts/prometheus.sh FOLDER}

say() { printf '[set-up] %s\n' "$*"; }

if command -v prometheus >/dev/null; then
    say "Prometheus is installed: $(command -v prometheus)"
    exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    say 'no Prometheus and no apt here: the test of the dashboard will be skipped'
    exit 0
fi

rm -rf "$folder"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial"
folder=$(cd "$folder" && pwd)
cd "$folder"
fetch() { apt-get "$@" download prometheus >"$folder/apt/log" 2>&1; }
ours=(-o "Dir::State::Lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache")
if ! fetch; then
    # No index of packages yet: one of our own, which does not need root.
    say 'asking apt which packages there are'
    { apt-get "${ours[@]}" update >"$folder/apt/log" 2>&1 && fetch "${ours[@]}"; } || {
        say "apt has no Prometheus for us: the test of the dashboard will be skipped ($folder/apt/log)"
        exit 0
    }
fi
dpkg-deb --extract prometheus_*.deb .
rm -rf apt etc lib var usr/lib usr/share prometheus_*.deb
say "$(usr/bin/prometheus --version 2>&1 | head -n 1)"
