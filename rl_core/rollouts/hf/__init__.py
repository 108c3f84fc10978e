"""Generation with Hugging Face models over a static KV cache."""
