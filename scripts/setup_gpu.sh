#!/usr/bin/env bash
# Installs what requirements/gpu.lock pins into the environment whose `python` comes first on the PATH.
# In a clone, the package itself is installed too (editable). The steps are wheels, compiled and package (default: all).
#
#   CUDA_HOME                toolkit for the step `compiled` (default: the one in the wheels, with the headers of CUDA,
#                            cuDNN and NCCL)
#   MAX_JOBS                 compilers at a time; each takes some GB of memory (default: as many as cores)
#   FLASH_ATTN_CUDA_ARCHS    targets of flash-attn: 80, 90, 100, 120, with semicolons (default: all)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/wheels_toolkit.sh
readonly LOCK=requirements/gpu.lock
# compiled against the installed torch, and Transformer Engine's core: without its torch extension, megatron-core cannot
# be imported
readonly COMPILED='^(transformer-engine(-cu13|-torch)?|flash-attn)=='

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
            use_wheels_toolkit
            install $(pinned '^transformer-engine(-cu13)?==')
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
