"""Policies that act in simulators: the trainer and the rollouts build the same class from the folder `model.path`."""
