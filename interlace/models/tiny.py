"""Small models built in code, with a byte tokenizer: real Hugging Face models that need no download."""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError, nearest
from interlace.core.plugins import load_callable
from interlace.models.config import OPENVLA_TYPE, VLA_TYPE, ModelConfig, RobotShape
from interlace.models.transformers_lock import TRANSFORMERS_LOCK

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


TINY = "tiny:"
PAD, EOS = "<pad>", "<eos>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TAGS = (TURN, TURN_END, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    "{%- macro open(role) %}{{ '<|im_start|>' + role[0] + '\n' }}{% endmacro %}"
    "{%- if tools %}{{ open('system') }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    "{%- for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties.keys() | join(', ') }})"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ open('system') + messages[0].content + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{% if not (loop.first and message.role == 'system') %}{{ open(message.role) }}"
    "{%- if message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}"
    "{%- else %}{{ message.content }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}{{ '<tool_call>' }}"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ open('assistant') }}{% endif %}"
)
"""ChatML with Hermes' tool calls in few bytes: first letters for roles, and only names and arguments for tools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """Sizes of a tiny model in Llama's architecture with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    max_positions: int = 1024
    initializer_range: float = 0.05
    """Standard deviation of the initial weights. With the usual 0.02, so narrow a model takes longer to start learning.
    """
    chat: bool = False
    """True for a tokenizer with a chat template and tokens for its tags."""


SHAPES = {
    "micro": TinyShape(hidden=64, layers=3, heads=4, feed_forward=256),
    "mini": TinyShape(hidden=128, layers=4, heads=4, feed_forward=512),
    "micro-chat": TinyShape(hidden=64, layers=3, heads=4, feed_forward=256, chat=True),
}
"""micro: 0.2 million parameters, learns on one CPU core. mini: 1.1 million. micro-chat: micro with a chat template."""


def refuse_tiny(kind: str, given: str) -> None:
    """Raises UserError if a tiny model is named for `kind`, such as a tokenizer, that is read from files."""
    if given.startswith(TINY):
        raise UserError(
            f"{kind} {given!r}: a tiny model has no files that can be read here, and no head that gives rewards; it "
            "can only be a policy or a teacher. Give a folder or a Hugging Face id. A reward model is a sequence "
            "classifier with one output."
        )


def check_tiny(name: str) -> TinyShape:
    """Returns the shape of `tiny:name`. Raises UserError for an unknown name."""
    if name not in SHAPES:
        raise UserError(f"unknown tiny model {name!r}.{nearest(name, SHAPES)}")
    return SHAPES[name]


def build_tiny(name: str, seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Builds a randomly initialised model, deterministic for a seed, and its tokenizer. Raises the errors of
    check_tiny.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = check_tiny(name)
    tokenizer = build_tokenizer(shape.max_positions, chat=shape.chat)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with TRANSFORMERS_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, tokenizer


def build_tokenizer(max_length: int, *, chat: bool = False) -> "PreTrainedTokenizerBase":
    """Builds a tokenizer with one token per byte, and one token for each tag of a thought and an answer.

    Decoding restores any text exactly, including the tags; pad and end-of-sequence are special tokens that can be
    skipped.
    chat: adds a chat template and its tags; an answer then ends with the template's end of a turn.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    if chat:
        tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in (TURN, TURN_END)])
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in CHAT_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END if chat else EOS,
        chat_template=CHAT_TEMPLATE if chat else None,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


UNKNOWN, SENSED = "<unk>", "<sensed>"
WORDS = """
a and at button door drawer from goal handle in it lever open close pick place press puck pull push put reach slide
soccer ball sweep the to top up down above window wall peg insert hammer nail coffee stick shelf basket balance keep
pole upright swing
"""


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Tokens that only the policy uses."""

    placeholder: int
    queries: tuple[int, ...]


def build_word_tokenizer(bins: int, num_queries: int, max_length: int) -> "tuple[PreTrainedTokenizerBase, SpecialIds]":
    """Builds the tokenizer. bins: action tokens. num_queries: query tokens of a chunk decoded in parallel."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, EOS, UNKNOWN, SENSED, *[f"<query{number}>" for number in range(num_queries)]]
    letters = string.ascii_lowercase + string.digits + string.punctuation
    actions = [f"<action{number}>" for number in range(bins)]
    pieces = [*actions, *special, *WORDS.split(), *letters, *[f"##{letter}" for letter in letters]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in actions])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    queries = tuple(vocabulary[f"<query{number}>"] for number in range(num_queries))
    return made, SpecialIds(vocabulary[SENSED], queries)


VLA = f"{TINY}vla"
VLA_MODULE = "interlace.robots.models.vla"
REGISTER = {VLA_TYPE: f"{VLA_MODULE}:register_vla", OPENVLA_TYPE: "interlace.robots.models.openvla:register_openvla"}
"""Import path of the function that registers an architecture with transformers, by model type; imported on first use.
"""


def list_built_names() -> list[str]:
    """Lists the paths of all models that are built in code."""
    return [*[f"{TINY}{name}" for name in SHAPES], VLA]


def build_model(config: ModelConfig) -> "PreTrainedModel":
    """Builds the model of a `tiny:` path.

    Raises UserError if the name is unknown, model.robot is missing (vla), or it is set for another model.
    """
    if config.path == VLA:
        build = load_callable("model", f"{VLA_MODULE}:build_tiny_vla")
        return build(_read_robot(config), config.seed)[0]  # type: ignore[index]
    _check_no_robot(config)
    return build_tiny(config.path.removeprefix(TINY), config.seed)[0]


def load_built_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Builds the tokenizer of a `tiny:` path. Raises the errors of build_model."""
    if config.path == VLA:
        from interlace.models.tiny import build_word_tokenizer

        shape = _read_robot(config)
        return build_word_tokenizer(shape.bins, shape.num_queries, shape.max_positions)[0]
    _check_no_robot(config)
    tiny = check_tiny(config.path.removeprefix(TINY))
    return build_tokenizer(tiny.max_positions, chat=tiny.chat)


def is_own_type(found: "PretrainedConfig") -> bool:
    """Returns True if a configuration has an architecture of this package."""
    return found.model_type in (VLA_TYPE, OPENVLA_TYPE)


def register_own(folder: Path) -> None:
    """Registers the architecture of a saved model with transformers, if it is one of this package."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return  # The next reader of the folder reports the error.
    named = found.get("model_type") if isinstance(found, dict) else None
    if named in REGISTER:
        load_callable("model", REGISTER[named])()


def _read_robot(config: ModelConfig) -> RobotShape:
    if config.robot is None:
        raise UserError(
            f"model {VLA} has no sizes of its own: set model.robot, such as {{state_size: 16, action_size: 4}}."
        )
    return config.robot


def _check_no_robot(config: ModelConfig) -> None:
    if config.robot is not None:
        given = config.path
        raise UserError(f"model.robot gives the sizes of {VLA}, and the model is {given!r}: take one or the other.")
