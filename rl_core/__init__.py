"""rljob's runtime: what runs inside the actor, rollout and env processes of a job, on a cluster and on one machine."""
