"""Training with PyTorch FSDP2 (gloo on CPU, NCCL on GPU)."""
