"""Environments and rewards; user code runs only here."""
