"""Workers that a job names in `spec.groups` for what recipes add to actor, rollout and env: reward models, judges, teachers."""
