"""Thoughts in `<think>`, then Hermes' calls: Qwen3 and others that reason."""

from interlace.rollouts.rendering.parsers.hermes import HermesParser


class Qwen3Parser(HermesParser):
    """Parser of reasoning before content and calls."""

    thoughts = ("<think>", "</think>")
    tags = (*HermesParser.tags, "<think>", "</think>")
    signs = (*HermesParser.signs, "</think>")
