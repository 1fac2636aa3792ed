#!/usr/bin/env bash
# Installs what requirements/gpu.lock pins into the environment whose `python` comes first on the PATH; for machines
# with NVIDIA GPUs and a CUDA toolkit of the major version that torch is built for, nvcc and cuDNN's headers included.
# In a clone, the package itself is installed too (editable).
#
#   MAX_JOBS                 compilers at a time; each takes some GB of memory (default: as many as cores)
#   FLASH_ATTN_CUDA_ARCHS    targets of flash-attn: 80, 90, 100, 120, with semicolons (default: all)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly LOCK=requirements/gpu.lock
readonly COMPILED='^(transformer-engine-torch|flash-attn)=='  # against the installed torch

install() { python -m pip install --no-deps --no-build-isolation "$@"; }

pinned() { grep -E "$1" "$LOCK"; }

if [ $# -eq 0 ]; then
    set -- wheels compiled package
fi
for step in "$@"; do
    case $step in
        wheels)
            # build tools first: a few pure Python packages are source packages
            install $(pinned '^(setuptools|wheel)==')
            install $(grep == "$LOCK" | grep -Ev "^#|$COMPILED")
            ;;
        compiled)
            # without NCCL's expert parallelism, which is unused here and needs more headers
            NVTE_WITH_NCCL_EP=0 install $(pinned '^transformer-engine-torch==')
            FLASH_ATTENTION_FORCE_BUILD=TRUE install $(pinned '^flash-attn==')
            ;;
        package)
            install -e .
            ;;
        *)
            echo "$0: no step is called $step; they are wheels, compiled and package" >&2
            exit 2
            ;;
    esac
done
