"""The Megatron backend: language models that megatron-core divides over tensor, pipeline and data ranks."""
