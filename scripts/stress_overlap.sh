#!/usr/bin/env bash
# Repeats a run with all overlap on 2 ranks while every core is kept busy, and compares all logical state and all losses bit by bit:
# see scripts/stress_overlap.py. Prints a table; exit code 0 only if all repetitions are equal.
#   bash scripts/stress_overlap.sh [REPETITIONS]          default 10
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
setup_environment "dev"
cd "$ROOT"
exec python scripts/stress_overlap.py "$@"
