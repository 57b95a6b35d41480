#!/usr/bin/env bash
# Set-up (see _env.sh), then the test suite. Arguments go to pytest:
#   bash scripts/run_tests.sh                                     everything, in two processes
#   bash scripts/run_tests.sh -q tests/unit_tests/optimizer       one folder
#   bash scripts/run_tests.sh tests/unit_tests/test_harness.py    one file, in this process
# Two processes are enough: tests of several ranks start their own, up to 8 each, and keep them for the next test.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
setup_environment "dev"
cd "$ROOT"
export OMP_NUM_THREADS=1

# Whether the arguments leave the choice of processes to us: no own choice, no debugger, no single file or test.
wants_two_processes() {
    local argument
    for argument in "$@"; do
        case "$argument" in
            -n* | --numprocesses* | --dist* | --pdb* | --trace | -s | --capture=no | -p | -pno:* | -h | --help | --version | --co | --collect-only | *::* | *.py) return 1 ;;
        esac
    done
}

PARALLEL=()
if wants_two_processes "$@"; then PARALLEL=(-n 2 --dist loadfile); fi
exec python -m pytest ${PARALLEL[@]+"${PARALLEL[@]}"} "$@"
