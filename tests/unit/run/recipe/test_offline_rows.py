"""Rows of SFT and DPO as tokens."""

import numpy as np

from interlace.core.types import Prompt
from interlace.models.config import ModelConfig
from interlace.models.loading import load_tokenizer
from interlace.run.recipe.offline_rows import RowEncoder

PLAIN = load_tokenizer(ModelConfig(path="tiny:micro"))


def test_a_completion_has_one_end_token_also_if_its_row_ends_with_it() -> None:
    """Data for trainers that add no end token has it in the text; the model would learn to write it twice."""
    encoder = RowEncoder(kind="demonstrations", tokenizer=PLAIN, renderer=None, demonstrator=None)

    def encode(completion: str) -> list[int]:
        prompt = Prompt(
            uid="rows/1", token_ids=np.array([5, 6], np.int32), text="", answer="", metadata={"completion": completion}
        )
        found: list[int] = encoder.encode(prompt).token_ids.tolist()
        return found

    assert encode("yes") == encode(f"yes{PLAIN.eos_token}") == [*PLAIN("yes")["input_ids"], PLAIN.eos_token_id]
