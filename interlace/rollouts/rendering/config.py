"""Settings of the renderer. Imports no transformers."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from interlace.core.config import Config

_ARGUMENTS = ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template")
"""Arguments of a chat template that a conversation sets."""


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
    chat_template_kwargs: Mapping[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables that the chat template reads, such as `enable_thinking: false`."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_settings(
        cls, settings: Mapping[str, bool | int | float | str]
    ) -> Mapping[str, bool | int | float | str]:
        if taken := [name for name in settings if name in _ARGUMENTS]:
            raise ValueError(f"{taken[0]} is set by the conversation; name variables of the chat template only")
        return settings
