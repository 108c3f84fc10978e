"""Checkpoints: folders that are either complete or invisible."""
