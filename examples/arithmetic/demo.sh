#!/usr/bin/env bash
# Makes the model and data when they are not there, then runs the job in a fresh output folder.
set -euo pipefail
cd "$(dirname "$0")"
[ -f model/model.safetensors ] || OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python prepare.py
rljob run job.yaml --output "outputs/$(date +%Y%m%d-%H%M%S)" "$@"
