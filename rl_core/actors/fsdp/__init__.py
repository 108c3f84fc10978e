"""Training with PyTorch FSDP1 or FSDP2 (gloo on CPU, NCCL on GPU)."""
