"""The child process of the SGLang engine: imports sglang, never the worker."""
