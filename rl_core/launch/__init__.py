"""Starts the processes of a launch plan on this machine."""
