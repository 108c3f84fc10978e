"""Torch-free types at the bottom of every layer: the job schema, records, identity, errors."""
