"""The trainer workers: the steps that all backends share, and a subpackage for each backend (`fsdp`, `megatron`)."""
