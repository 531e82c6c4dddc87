"""Parsers of answers, one file for each format of thoughts and tool calls, found by name."""
