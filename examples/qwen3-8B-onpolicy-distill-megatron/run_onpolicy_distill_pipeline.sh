#!/bin/bash
# Pure distillation from one teacher. Extra arguments are overrides (key=value) and are handed on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec examples/run_launcher.sh start_onpolicy_distill_pipeline.py \
  --config_path examples/qwen3-8B-onpolicy-distill-megatron \
  --config_name onpolicy_distill_config \
  "$@"
