"""Weights with a version, a manifest and an acknowledgement per receiver."""
