#!/usr/bin/env bash
# N ranks on this machine:  bash scripts/launch_local.sh N --config FILE.yaml [flags]
# Checks the configuration first, in one process, so that a mistake is one message and exit code 2, not torchrun's report.
set -euo pipefail
[[ "${1:-}" =~ ^[1-9][0-9]*$ ]] || { echo "usage: bash scripts/launch_local.sh N --config FILE.yaml [flags]   (N = number of ranks)" >&2; exit 2; }
RANKS=$1
shift
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python pretrain_gpt.py "$@" --dry-run --world-size "$RANKS"
exec python -m torch.distributed.run --standalone --nproc-per-node "$RANKS" pretrain_gpt.py "$@"
