"""Creation of renderers and lookup of parsers by their settings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.plugins import class_names, find_class
from interlace.rollouts.rendering import parsers
from interlace.rollouts.rendering.chat_template import Renderer
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.parsers.base import Parser
from interlace.rollouts.rendering.parsers.hermes import HermesParser
from interlace.rollouts.rendering.parsers.qwen3 import Qwen3Parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def create_renderer(
    tokenizer: "PreTrainedTokenizerBase", config: RendererConfig, stop_token_ids: Sequence[int] = ()
) -> Renderer:
    """Creates the renderer of a tokenizer. stop_token_ids: of the model. Raises UserError without a template."""
    parser = load_parser(config.parser) if config.parser else find_parser(str(tokenizer.chat_template or ""))
    if config.parser is None and config.tools == "prompt":  # then calls have Hermes' format under any template
        parser = Qwen3Parser() if parser.thoughts else HermesParser()
    return Renderer(tokenizer, parser, config, stop_token_ids)


def load_parser(name: str) -> Parser:
    """Loads a built-in by name, or a user's `package.module:Name`. Raises UserError if it does not exist."""
    return find_class("parser", parsers, name, Parser)()  # type: ignore[type-abstract]


def find_parser(template: str) -> Parser:
    """Returns the parser whose signs a chat template contains, the one with most signs. If none matches, Hermes'."""
    found = [load_parser(name) for name in class_names(parsers, Parser)]
    fitting = [one for one in found if one.signs and all(sign in template for sign in one.signs)]
    return max(fitting, key=lambda one: (len(one.signs), type(one).__name__), default=HermesParser())


def check_renderer(config: RendererConfig) -> None:
    """Raises UserError if the parser does not exist."""
    if config.parser:
        try:
            load_parser(config.parser)
        except UserError as error:
            raise UserError(f"renderer.parser: {error}") from None
