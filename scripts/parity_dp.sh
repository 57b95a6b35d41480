#!/usr/bin/env bash
# Every combination of the overlap options against no overlap, bit by bit, and plain and distributed optimizer against plain torch in
# float64, on 1 to 4 data-parallel CPU ranks: see scripts/parity_dp.py. Prints two tables; exit code 0 only if everything agrees.
#   bash scripts/parity_dp.sh [--ranks 1 2 3 4]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
setup_environment "dev"
cd "$ROOT"
export OMP_NUM_THREADS=1
exec python scripts/parity_dp.py "$@"
