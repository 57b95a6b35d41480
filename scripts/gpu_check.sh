#!/usr/bin/env bash
# Checks everything that needs a GPU, on one GPU, in under 10 minutes, without installing anything: see scripts/bench/gpu_check.py.
#   bash scripts/gpu_check.sh [--skip throughput] [--json results.json]       PYTHON=... chooses the interpreter
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
PYTHON="${PYTHON:-$(command -v python || command -v python3)}"
"$PYTHON" - <<'PY'
import importlib.util, sys
missing = [package for package in ("torch", "numpy", "yaml") if importlib.util.find_spec(package) is None]
if sys.version_info < (3, 11) or missing:
    print(f"error: {sys.executable} is Python {sys.version.split()[0]} without {', '.join(missing) or 'nothing'}; needed are Python >= 3.11, "
          "torch, numpy and pyyaml; set PYTHON to an interpreter that has them", file=sys.stderr)
    sys.exit(2)
PY
exec "$PYTHON" "$ROOT/scripts/bench/gpu_check.py" "$@"
