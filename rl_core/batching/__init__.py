"""Batching: which tokens share a forward pass, which rows share a rank, and how records become tensors.

All functions are pure: they use no process group, clock or global state. A number on which ranks must agree is agreed by a callable
argument. `balance` and `microbatch` do not import torch.
"""
