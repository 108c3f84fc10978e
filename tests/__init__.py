"""Tests, and what they share: every helper is imported from this root, as in `from tests.integration.rpc_samples import Service`."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Folder of the repository. Child processes get it in PYTHONPATH to import helpers."""
