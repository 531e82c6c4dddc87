"""Loading of causal language models and their tokenizers by transformers' Auto classes, and construction of small
models.
"""
