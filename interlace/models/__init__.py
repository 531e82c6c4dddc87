"""Loading and building causal language models with their tokenizers, by the Auto classes."""
