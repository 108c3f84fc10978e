"""Prompts as the runner reads them and the tokenizer every role shares. Torch-free."""
