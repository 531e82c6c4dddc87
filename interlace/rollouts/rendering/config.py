"""Settings of the renderer. Imports no transformers."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from interlace.core.config import Config

_ARGUMENTS = ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template")
"""Arguments of a chat template that a conversation sets."""


class RendererConfig(Config):
    """Settings of the conversion of messages to tokens, and of answers to messages."""

    parser: str | None = None
    """Parser of thoughts and tool calls: a built-in, or your own as package.module:Name. If None, the built-in whose
    tags the chat template contains, or with `tools: prompt` the one of Hermes' format."""
    tools: Literal["template", "prompt"] = "template"
    """Presentation of tools. template: by the chat template. prompt: for templates without tools, described in the
    system message, called in Hermes' format, and answered in messages of the user."""
    on_rewrite: Literal["append", "branch"] = "append"
    """Treatment of a turn if the chat template would change earlier turns, for example remove their thoughts. append:
    earlier turns stay as they were sampled. branch: the whole conversation is rendered again, and the turn begins a
    branch."""
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
