"""Logging, events, trackers, statistics."""
