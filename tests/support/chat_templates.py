"""Chat templates of public models, with a small tokenizer that has the tags of a template as tokens."""

import os
import random
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from interlace.models.tiny import CHAT_TEMPLATE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template without tools, calls and thoughts."""
PUBLISHED = (
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
    "qwen3_5_think",
    "llama3_1",
    "llama3_2",
    "glm4moe",
    "nemotron_3_nano",
    "lfm2_v2",
    "deepseekv3",
)
"""Names of templates from the models' repositories. The package trl contains them, to recognise models."""
FOLDER = os.environ.get("INTERLACE_TEMPLATES", "")
GIVEN = tuple(sorted(path.stem for path in Path(FOLDER).glob("*.jinja"))) if FOLDER else ()
"""Further templates from a folder of NAME.jinja files, such as vendor/llama.cpp/models/templates in the source package
of llama-cpp-python, which contains templates of Mistral, Hermes and DeepSeek."""
TAGS = re.compile(r"<\|?/?[a-z_]+\|?>|<\|[A-Za-z_]+\|>|<[\uff5c][^>]*?[\uff5c]>|\[/?[A-Z_]+\]|\[gMASK\]")
WORDS = 'the a sum is what plus 12 34 true false null tool call answer name arguments city \n{ } " : , . ? é 東京 🙂'


def published(name: str) -> str:
    """Returns the text of a template. Skips the test if the package is not installed."""
    if name in GIVEN:
        return (Path(FOLDER) / f"{name}.jinja").read_text(encoding="utf-8")
    trl = pytest.importorskip("trl")
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"trl has no template {name}")
    return path.read_text(encoding="utf-8")


@cache
def tokenizer_of(name: str) -> "PreTrainedTokenizerBase":
    """Returns a byte-pair tokenizer with merges, and the tags of a template as tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = CHAT_TEMPLATE if name == "own" else published(name)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    corpus = [" ".join(rng.choices(WORDS.split(" "), k=30)) for _ in range(300)]
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    tags = sorted({*TAGS.findall(template), "<eos>", "<bos>"})
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
    ends = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<\uff5cend▁of▁sentence\uff5c>")
    end = next((tag for tag in ends if tag in tags), "<eos>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<eos>",
        eos_token=end,
        bos_token="<bos>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
