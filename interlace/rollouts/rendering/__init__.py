"""Chat messages as tokens and back."""
