"""Writers and readers are killed in mid-transfer: no engine ever serves a torn version, and nothing hangs."""

import random
import time
from pathlib import Path

import pytest

from interlace.weights.config import WeightsConfig
from interlace.weights.ref import WeightRef
from tests.support.weight_ends import End, parts_of, serve, writers

TRANSPORTS = ("shared_memory", "gloo", "folder")
NUM_RANKS, NUM_ENGINES = 2, 2
LONGEST_S = 0.03
"""About as long as a publication takes here: a kill falls anywhere in it, or just behind."""


def kill_many(folder: Path, transport: str, num_kills: int, seed: int) -> tuple[int, int]:
    """Returns how many versions were published, and how many were lost with a writer."""
    draw = random.Random(seed)
    config = WeightsConfig(transport=transport, folder=str(folder), patience_s=5.0)
    trainer, engines = writers(config, NUM_RANKS), [End(serve) for _ in range(NUM_ENGINES)]
    refs: dict[int, WeightRef] = {}
    version = lost = kills = 0
    while kills < num_kills:
        version += 1
        victim = draw.choice(["writer", "writer serving", "reader", "none"])
        for end in trainer:
            end.tell(version)
        if victim == "writer":
            time.sleep(draw.uniform(0, LONGEST_S))  # the moment is drawn, nothing waits for it
            draw.choice(trainer).kill()
            kills += 1
        parts = parts_of(trainer)
        written = [part for part in parts if part is not None]
        if len(written) == NUM_RANKS:
            refs[version] = WeightRef(version=version, parts=tuple(written))
        else:
            lost += 1
        # What was published last goes to the engines, though one of its writers may be dead by now.
        newest = refs[max(refs)] if refs else None
        for engine in engines:
            engine.tell(newest)
        if victim in ("writer serving", "reader"):
            time.sleep(draw.uniform(0, LONGEST_S))
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


@pytest.mark.slow  # a hundred kills each, and as many processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_hundred_kills_tear_nothing(tmp_path: Path, transport: str) -> None:
    published, lost = kill_many(tmp_path, transport, num_kills=100, seed=2)
    assert published > 20 and lost, "some kills fell into the writing"
