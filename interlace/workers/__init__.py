"""Thin shells around one thing each: an engine, a scorer. No mathematics here."""
