#!/bin/bash
# Distillation mixed with a reward. Extra arguments are overrides (key=value) and are handed on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec examples/run_launcher.sh start_rlvr_pipeline.py \
  --config_path examples/qwen3-8B-rlvr-opd-megatron \
  --config_name rlvr_opd_config \
  "$@"
