"""Environments, which answer and score message logs. User code runs in child processes of the env worker only."""
