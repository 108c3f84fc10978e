#!/usr/bin/env bash
# Makes the model and data unless they are there, then runs the job in a fresh output folder.
set -euo pipefail
cd "$(dirname "$0")"
python prepare.py
rljob run job.yaml --output "outputs/$(date +%Y%m%d-%H%M%S)" "$@"
