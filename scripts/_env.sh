# The one set-up step of quickstart.sh, run_tests.sh and .ci/run; sourced by them. Safe to run again: what is done is kept.
#
#   setup_environment "dev"     # afterwards `python` is one that has the project's requirements and those of the named extras
#
# Which Python:  an active virtual environment (VIRTUAL_ENV, CONDA_PREFIX) that has torch, as it is (in a container whose system
#                Python has torch: VIRTUAL_ENV=/usr); else .venv in this folder, made with Python >= 3.11
# An environment that is not ours gets only the packages it lacks: its torch stays, this checkout is not installed into it.
# Which torch in .venv:  TORCH_SPEC       what to install (default torch==2.13.0)
#                        TORCH_INDEX_URL  the package index to take it from, for example that of PyTorch's CPU builds
# Python 3.11 is preferred where several are there, since it is what the project is tested with.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
_OLDEST_PYTHON="3.11"

_say() { printf 'set-up: %s\n' "$*" >&2; }

_fail() {
    printf 'set-up failed: %s\n' "$*" >&2
    exit 1
}

# _quietly LOG COMMAND...: output goes to LOG; its end is shown when the command fails.
_quietly() {
    local log="$1"
    shift
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null && return 0
    tail -n 25 "$log" >&2
    _fail "'$*' did not succeed; the whole log is $log"
}

_is_new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < (${_OLDEST_PYTHON/./, }))" >/dev/null 2>&1; }

_has_torch() { "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' >/dev/null 2>&1; }

# Prints the interpreter of an environment of the user's that can be taken as it is; nothing if there is none.
_given_python() {
    local prefix="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
    [ -n "$prefix" ] && [ "$(cd "$prefix" 2>/dev/null && pwd -P)" != "$ROOT/.venv" ] || return 0
    if ! _is_new_enough "$prefix/bin/python"; then
        _say "the active environment $prefix has no Python >= $_OLDEST_PYTHON: using $ROOT/.venv"
    elif ! _has_torch "$prefix/bin/python"; then
        _say "the active environment $prefix has no torch: using $ROOT/.venv"
    else
        printf '%s\n' "$prefix/bin/python"
    fi
}

# Prints the first interpreter that runs, is new enough and can make virtual environments.
_find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3.14 python3 python; do
        if _is_new_enough "$name" && "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    _fail "no Python >= $_OLDEST_PYTHON with the venv module on PATH; install one (on Debian or Ubuntu: python3.11 and python3.11-venv)"
}

# _fill_given PYTHON EXTRAS: installs what is missing, keeping the torch that is there.
_fill_given() {
    local python="$1" missing log
    missing="$("$python" "$ROOT/scripts/missing_requirements.py" "$ROOT/pyproject.toml" "$2")" || _fail "could not read the requirements"
    [ -n "$missing" ] || return 0
    _say "installing into $("$python" -c 'import sys; print(sys.prefix)') what it lacks: ${missing//$'\n'/ }"
    "$python" -m pip --version >/dev/null 2>&1 || _fail "$python has no pip; install there: ${missing//$'\n'/ }"
    log="$(mktemp "${TMPDIR:-/tmp}/megadlms-setup.XXXXXX")"
    "$python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$log.constraint" || _fail "torch has no version in $python"
    printf '%s\n' "$missing" >"$log.missing"
    _quietly "$log" "$python" -m pip install --constraint "$log.constraint" --requirement "$log.missing"
    rm -f "$log" "$log.constraint" "$log.missing"
}

# _install_torch PYTHON LOG: only where it is missing.
_install_torch() {
    local python="$1" log="$2" spec="${TORCH_SPEC:-torch==2.13.0}" gpu="no NVIDIA GPU here"
    "$python" -c 'import torch' >/dev/null 2>&1 && return 0
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && gpu="NVIDIA GPU found"
    _say "2/3 $spec ($gpu; about a minute)"
    _quietly "$log" "$python" -m pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$spec"
    "$python" -c 'import torch' >>"$log" 2>&1 || _fail "torch is installed but cannot be imported; see the end of $log"
    if [ "$gpu" != "NVIDIA GPU found" ] && "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then
        _say "    pip chose a CUDA build. It works here; TORCH_INDEX_URL set to PyTorch's index of CPU builds gives a smaller one."
    fi
}

# _fill_own EXTRAS: .venv, torch, this project with its extras; a stamp of what was asked for makes the next call do nothing.
_fill_own() {
    local extras="$1" python="$ROOT/.venv/bin/python" log="$ROOT/.venv/setup.log" stamp="$ROOT/.venv/.setup-stamp-${1//,/-}" wanted found
    _wanted() { { cat "$ROOT/pyproject.toml" && echo "$ROOT $extras ${TORCH_SPEC:-} $("$python" -VV)"; } | cksum; }
    [ -x "$python" ] && [ -s "$stamp" ] && [ "$(_wanted)" = "$(cat "$stamp")" ] && return 0
    if ! _is_new_enough "$python"; then
        [ ! -x "$python" ] || ! "$python" -c '' 2>/dev/null || _fail "$ROOT/.venv is older than Python $_OLDEST_PYTHON; remove that folder and start again"
        found="$(_find_python)" || exit 1
        _say "1/3 new environment $ROOT/.venv ($("$found" --version))"
        _quietly "$log" "$found" -m venv "$ROOT/.venv"
    fi
    "$python" -m pip --version >/dev/null 2>&1 || _quietly "$log" "$python" -m ensurepip --upgrade
    _install_torch "$python" "$log"
    _say "3/3 this project${extras:+ with the packages for \"$extras\"} (about a minute)"
    _quietly "$log" "$python" -m pip install --editable "$ROOT${extras:+[$extras]}"
    _wanted >"$stamp"
}

# setup_environment EXTRAS: extras of pyproject.toml, separated by commas. Exits the calling script where it cannot succeed.
setup_environment() {
    local python
    python="$(_given_python)" || exit 1
    if [ -n "$python" ]; then
        _fill_given "$python" "$1" || exit 1
    else
        python="$ROOT/.venv/bin/python"
        mkdir -p "$ROOT/.venv"
        ( # one at a time, where the machine has flock
            if command -v flock >/dev/null 2>&1; then flock 9; fi
            _fill_own "$1" 9>&-
        ) 9>"$ROOT/.venv/.setup-lock" || exit 1
        export VIRTUAL_ENV="$ROOT/.venv"
        unset PYTHONHOME
    fi
    export PATH="$(dirname "$python"):$PATH"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}
