"""Readers of answers: how a model's format marks thoughts and tool calls. One file each, found by name."""
