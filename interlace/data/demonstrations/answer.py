"""The answer itself, as in plain supervised fine-tuning on prompt and answer columns."""

import random

from interlace.core.types import Prompt
from interlace.data.demonstrations import base


class Demonstrator(base.Demonstrator):
    """Repeats the row's answer."""

    def write(self, prompt: Prompt, rng: random.Random) -> str:
        del rng
        return prompt.answer
