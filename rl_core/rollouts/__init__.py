"""Engines that generate and the manager that turns prompts into records."""
