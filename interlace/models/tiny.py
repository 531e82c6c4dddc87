"""Small models built in code, with a byte tokenizer: real Hugging Face models that need no download."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlace.core.errors import UserError, nearest
from interlace.models.transformers_lock import TRANSFORMERS_LOCK

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
