"""Reads data sets into prompts, and the tokenizer that runner and rollouts share. Torch-free."""
