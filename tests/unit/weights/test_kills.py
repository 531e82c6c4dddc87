"""If writers and readers are killed during a transfer, no engine serves a torn version, and nothing hangs."""

import random
import time
from pathlib import Path

import pytest

from interlace.weights.config import WeightsConfig
from interlace.weights.ref import WeightRef
from tests.support.weight_ends import End, parts_of, serve, writers

TRANSPORTS = ("shared_memory", "gloo", "folder")
NUM_RANKS, NUM_ENGINES = 2, 2
NUM_KILLS, SEEDS = 25, range(4)
"""Kills of one test, and its seeds: 300 over the three transports, each test well within a test's limit."""


def kill_many(folder: Path, transport: str, num_kills: int, seed: int) -> tuple[int, int]:
    """Returns how many versions were published, and how many were lost with a writer."""
    draw = random.Random(seed)
    config = WeightsConfig(transport=transport, folder=str(folder), patience_s=5.0)
    trainer, engines = writers(config, NUM_RANKS), [End(serve) for _ in range(NUM_ENGINES)]
    refs: dict[int, WeightRef] = {}
    version = lost = kills = 0
    writing_s = reading_s = 0.0
    """How long the last undisturbed halves of a publication took: a kill falls anywhere in one."""
    while kills < num_kills:
        version += 1
        victim = draw.choice(["writer", "writer serving", "reader", "none"]) if refs else "none"
        began_s = time.monotonic()
        for end in trainer:
            end.tell(version)
        if victim == "writer":
            time.sleep(draw.uniform(0, 0.9 * writing_s))  # the moment is drawn, nothing waits for it
            draw.choice(trainer).kill()
            kills += 1
        parts = parts_of(trainer)
        written = [part for part in parts if part is not None]
        if len(written) == NUM_RANKS:
            refs[version] = WeightRef(version=version, parts=tuple(written))
        else:
            lost += 1
        if victim != "writer":
            writing_s = time.monotonic() - began_s
        # What was published last goes to the engines, though one of its writers may be dead by now.
        newest = refs[max(refs)] if refs else None
        began_s = time.monotonic()
        for engine in engines:
            engine.tell(newest)
        if victim in ("writer serving", "reader"):
            time.sleep(draw.uniform(0, reading_s))
            draw.choice(trainer if victim == "writer serving" else engines).kill()
            kills += 1
        for place, engine in enumerate(engines):
            if not engine.process.is_alive():
                engines[place] = late = End(serve)  # it asks for the newest version; nobody waits for it
                late.tell(newest if all(end.process.is_alive() for end in trainer) else None)
                late.assert_whole(refs)
            else:
                served, refusal = engine.assert_whole(refs)
                writers_live = victim in ("reader", "none")
                assert not writers_live or (newest and served == newest.version), refusal
        if victim == "none":
            reading_s = time.monotonic() - began_s
        if not all(end.process.is_alive() for end in trainer):
            for end in trainer:
                end.kill()
            trainer = writers(config, NUM_RANKS)  # as a run that was resumed; the engines serve on
            for engine in engines:
                engine.tell(None)
                engine.assert_whole(refs)
    for end in (*trainer, *engines):
        end.kill()
    return len(refs), lost


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_kill_leaves_every_engine_on_a_whole_version(tmp_path: Path, transport: str) -> None:
    published, _ = kill_many(tmp_path, transport, num_kills=6, seed=1)
    assert published


@pytest.mark.parametrize("after_s", [None, 0.0, 0.005, 0.02, 0.05])
@pytest.mark.parametrize("knows", [False, True])
def test_a_dead_writer_is_named_at_once(*, knows: bool, after_s: float | None) -> None:
    """after_s: between the question and the kill; None: it is dead before. knows: the engine has asked it before."""
    config = WeightsConfig(transport="gloo", patience_s=30.0)
    trainer, engine = writers(config, 2), End(serve)

    def published(version: int) -> WeightRef:
        for end in trainer:
            end.tell(version)
        return WeightRef(version=version, parts=tuple(part for part in parts_of(trainer) if part))

    refs = {version: published(version) for version in (1, 2)}
    if knows:
        engine.tell(refs[1])
        assert engine.assert_whole(refs)[0] == 1
    if after_s is None:
        trainer[1].kill()
    engine.tell(refs[2])
    if after_s is not None:
        time.sleep(after_s)
        trainer[1].kill()
    began_s = time.monotonic()
    served, refusal = engine.assert_whole(refs)
    assert time.monotonic() - began_s < 10, "it waited for a process that is dead"
    assert served == 2 or ("from trainer rank 1" in refusal and "its process has ended" in refusal)
    for end in (*trainer, engine):
        end.kill()


@pytest.mark.slow  # a hundred kills for each transport, and as many processes
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_hundred_kills_tear_nothing(tmp_path: Path, transport: str, seed: int) -> None:
    published, lost = kill_many(tmp_path, transport, NUM_KILLS, seed=2 + seed)
    assert published > NUM_KILLS // 3 and lost, "some kills fell into the writing"
