"""Rows of a run that trains on given rows."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from interlace.core.types import Prompt, Sample
from interlace.models.config import ModelConfig
from interlace.models.loading import load_tokenizer
from interlace.run.offline import PART, encode_on_thread
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.offline_encoder import create_encoder, take_checked_rows
from interlace.run.recipe.offline_rows import RowEncoder
from interlace.run.recipe.prompts import recipe_prompts
from interlace.runtime.waits import LoopClock, WaitRegistry

ENCODER = RowEncoder(
    kind="demonstrations", tokenizer=load_tokenizer(ModelConfig(path="tiny:micro")), renderer=None, demonstrator=None
)
ROWS = [
    Prompt(
        uid=f"rows/{number}",
        token_ids=np.array([5], np.int32),
        text="",
        answer="",
        metadata={"completion": f"{number}"},
    )
    for number in range(2 * PART + 3)
]


def test_the_event_loop_continues_while_rows_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large data set blocked it until the run ended with an error of its watchdog."""
    may_encode, encode = threading.Event(), RowEncoder.encode

    def wait_and_encode(self: RowEncoder, prompt: Prompt) -> Sample:
        assert may_encode.wait(30.0), "the loop is blocked"
        return encode(self, prompt)

    async def encode_beside_the_loop() -> list[Sample]:
        waits = WaitRegistry(LoopClock(asyncio.get_running_loop()))
        task = asyncio.create_task(encode_on_thread(ENCODER, ROWS, waits, {}))
        while not waits.num_running:
            await asyncio.sleep(0.01)
        may_encode.set()
        return await task

    monkeypatch.setattr(RowEncoder, "encode", wait_and_encode)
    samples = asyncio.run(encode_beside_the_loop())
    assert [sample.prompt.uid for sample in samples] == [row.uid for row in ROWS]


def test_a_run_takes_the_rows_that_its_check_has_encoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows were encoded twice, which took 7 to 22 s for 100,000 rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1", "completion": f"{number}"}) + "\n" for number in range(9)))
    recipe = load_recipe("sft", [f"task={path}"])
    check_recipe(recipe)
    prompts = recipe_prompts(recipe).train
    edited = [replace(prompts[0], metadata={"completion": "edited"}), replace(prompts[1], text="2"), *prompts[2:]]
    anew = create_encoder(recipe)
    encoded: list[str] = []
    encode: Callable[[RowEncoder, Prompt], Sample] = RowEncoder.encode

    def note_and_encode(self: RowEncoder, prompt: Prompt) -> Sample:
        encoded.append(prompt.uid)
        return encode(self, prompt)

    async def encode_for_the_run() -> list[Sample]:
        waits = WaitRegistry(LoopClock(asyncio.get_running_loop()))
        return await encode_on_thread(anew, edited, waits, take_checked_rows(recipe))

    monkeypatch.setattr(RowEncoder, "encode", note_and_encode)
    samples = asyncio.run(encode_for_the_run())
    assert encoded == [edited[0].uid, edited[1].uid]
    expected = [encode(anew, prompt).token_ids.tolist() for prompt in edited]
    assert [sample.token_ids.tolist() for sample in samples] == expected
    assert all(sample.prompt.metadata is prompt.metadata for sample, prompt in zip(samples, edited, strict=True))
    assert not take_checked_rows(recipe), "a second process of the run encodes the rows of its own data"


def test_a_stop_waits_for_one_part_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode: Callable[[RowEncoder, Prompt], Sample] = RowEncoder.encode

    async def cancel_in_the_first_part() -> None:
        loop = asyncio.get_running_loop()

        def encode_and_cancel(self: RowEncoder, prompt: Prompt) -> Sample:
            encoded.append(prompt.uid)
            loop.call_soon_threadsafe(task.cancel)
            return encode(self, prompt)

        monkeypatch.setattr(RowEncoder, "encode", encode_and_cancel)
        waits = WaitRegistry(LoopClock(loop))
        task = asyncio.create_task(encode_on_thread(ENCODER, ROWS, waits, {}))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_in_the_first_part())
    assert 0 < len(encoded) <= PART
