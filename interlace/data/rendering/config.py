"""Settings of the renderer. Imports no transformers."""

from typing import Literal

from interlace.core.config import Config


class RendererConfig(Config):
    """How messages become a model's tokens, and its answers messages."""

    parser: str | None = None
    """Format of thoughts and tool calls, a built-in or your own as package.module:Name; None finds the built-in whose
    marks the chat template writes."""
    tools: Literal["template", "prompt"] = "template"
    """Way to show tools. template: the chat template writes them. prompt: for a template that knows no tools, they are
    described in the system message, called in Hermes' format, and answered in messages of the user."""
    on_rewrite: Literal["append", "branch"] = "append"
    """Way of a turn whose chat template would write earlier turns in another way than they were drawn, such as without
    their thoughts. append: the earlier turns stay as they were drawn. branch: the conversation is written from the
    beginning, and the turn begins a branch."""
