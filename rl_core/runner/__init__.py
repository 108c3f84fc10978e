"""The runner: the process that controls a run. It runs the training loop, leases prompts, saves checkpoints and reports the status."""
