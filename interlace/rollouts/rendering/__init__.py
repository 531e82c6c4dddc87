"""Conversion of chat messages to tokens and back."""
