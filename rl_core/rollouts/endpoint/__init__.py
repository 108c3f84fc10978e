"""The OpenAI endpoint of a rollout: agent programs call it like any other model server, and every sampled token is recorded."""
