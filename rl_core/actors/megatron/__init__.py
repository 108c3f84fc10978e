"""The Megatron backend: language models cut by megatron-core over tensor and data ranks, behind the ports of `actors.backend`."""
