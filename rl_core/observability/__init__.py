"""Logging, metrics, timers, trackers."""
