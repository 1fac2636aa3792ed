#!/usr/bin/env bash
# Wheels of Transformer Engine and flash-attn for GPU machines without a network: built once on a machine with the wheels
# of requirements/gpu.lock, cut into pieces, joined and installed elsewhere. Not run on a GPU yet.
#
#   gpu_extensions.sh build DIRECTORY [transformer-engine flash2 flash3]   wheels for the installed torch (default: the first two)
#   gpu_extensions.sh cut DIRECTORY MIB       the wheels as pieces of at most MIB MiB in DIRECTORY/pieces, with SHA256SUMS
#   gpu_extensions.sh join DIRECTORY          the wheels again from DIRECTORY/pieces
#   gpu_extensions.sh install DIRECTORY       the wheels into the environment whose `python` comes first on the PATH
#
#   CUDA_HOME               toolkit (default: the one in the wheels)
#   CUDA_ARCHS              compute capabilities, as 90 or 80;90 (default: 90, H100 and H200)
#   MAX_JOBS                compilers at a time; each takes some GB of memory (default: as many as cores)
#   FLASH_ATTENTION_SOURCE  a clone of flash-attention with its submodules, for flash3 (its directory hopper/)
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/wheels_toolkit.sh"
LOCK=$HERE/../requirements/gpu.lock
readonly LOCK ARCHS=${CUDA_ARCHS:-90}

usage() { sed -n '5,8s/^# *//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
pinned() { grep -E "$1" "$LOCK"; }
wheel() { python -m pip wheel --no-deps --no-build-isolation --wheel-dir "$directory" "$@"; }

build() {
    local part
    [ $# -gt 0 ] || set -- transformer-engine flash2
    use_wheels_toolkit
    for part in "$@"; do
        case $part in
            transformer-engine) # the core library is a wheel; the torch extension is compiled
                NVTE_CUDA_ARCHS=$ARCHS NVTE_WITH_NCCL_EP=0 wheel $(pinned '^transformer-engine(-cu13|-torch)?==')
                ;;
            flash2)
                FLASH_ATTN_CUDA_ARCHS=$ARCHS FLASH_ATTENTION_FORCE_BUILD=TRUE wheel $(pinned '^flash-attn==')
                ;;
            flash3) # kernels that training does not call are left out
                : "${FLASH_ATTENTION_SOURCE:?is not set; clone flash-attention with --recurse-submodules and give its path}"
                FLASH_ATTENTION_DISABLE_SM80=TRUE FLASH_ATTENTION_DISABLE_FP8=TRUE \
                    FLASH_ATTENTION_DISABLE_PAGEDKV=TRUE FLASH_ATTENTION_DISABLE_APPENDKV=TRUE \
                    FLASH_ATTENTION_DISABLE_SPLIT=TRUE FLASH_ATTENTION_DISABLE_SOFTCAP=TRUE \
                    FLASH_ATTENTION_FORCE_BUILD=TRUE wheel "$FLASH_ATTENTION_SOURCE/hopper"
                ;;
            *)
                echo "$0: no part is called $part; they are transformer-engine, flash2 and flash3" >&2
                exit 2
                ;;
        esac
    done
}

cut_wheels() {
    [[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage
    local file
    rm -rf "$directory/pieces"
    mkdir "$directory/pieces"
    for file in "$directory"/*.whl; do
        split --bytes="${1}M" --numeric-suffixes --suffix-length=3 "$file" "$directory/pieces/$(basename "$file")."
    done
    (cd "$directory" && sha256sum ./*.whl >pieces/SHA256SUMS)
}

join_wheels() {
    local piece
    for piece in "$directory"/pieces/*.whl.000; do
        cat "${piece%.000}".[0-9][0-9][0-9] >"$directory/$(basename "${piece%.000}")"
    done
    (cd "$directory" && sha256sum --check --quiet pieces/SHA256SUMS)
}

[ $# -ge 2 ] || usage
step=$1 directory=$2
shift 2
mkdir -p "$directory"
case $step in
    build) build "$@" ;;
    cut) cut_wheels "$@" ;;
    join) join_wheels ;;
    install) python -m pip install --no-deps --no-index "$directory"/*.whl ;;
    *) usage ;;
esac
