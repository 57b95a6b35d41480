#!/usr/bin/env bash
# Every layout with every feature against plain torch, fp64 and fp32: see scripts/parity.py. Prints a table per measure and writes it;
# exit code 0 only if everything is within its bound. A run that was stopped goes on where it was.
#   bash scripts/parity.sh [--ranks 4] [--results runs/parity.jsonl] [--table runs/parity.md] [--fresh]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
setup_environment "dev"
cd "$ROOT"
export OMP_NUM_THREADS=1
exec python scripts/parity.py "$@"
