"""The loop: ledger, GRPO program, status, stalls."""
