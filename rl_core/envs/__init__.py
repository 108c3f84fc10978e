"""Environments: they answer and score message logs; user code runs in child processes of the env worker only."""
