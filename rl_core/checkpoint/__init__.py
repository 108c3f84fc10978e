"""Checkpoints that are complete or invisible."""
