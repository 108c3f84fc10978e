"""NeMo-Gym servers as a client sees them: `client` calls them over HTTP, `answers` reads what they answer. Used by rollouts and envs."""
