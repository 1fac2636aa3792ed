# Sourced by the scripts that compile extensions: the CUDA toolkit in the wheels of requirements/gpu.lock.

# Set CUDA_HOME to this toolkit unless it is set. nvcc finds its libraries in lib64, and the linker needs a libcudart
# without a version.
use_wheels_toolkit() {
    [ -z "${CUDA_HOME:-}" ] || return 0
    CUDA_HOME=$(python -c 'import nvidia.cu13; print(*nvidia.cu13.__path__)')
    ln -sfn lib "$CUDA_HOME/lib64"
    ln -sfn libcudart.so.13 "$CUDA_HOME/lib/libcudart.so"
    export CUDA_HOME NVTE_BUILD_USE_NVIDIA_WHEELS=1
}
