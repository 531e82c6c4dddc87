"""A context kept during a tool call is found only by its sample, evicted first, and never changes a sample."""

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from interlace.core.types import Request, Response, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams
from interlace.engines.rollout.config import KVKind

ModelMaker = Callable[..., PreTrainedModel]
SYSTEM = [(7 * place) % 90 for place in range(50)]
HINT = [3, 4, 5]


def turn(gid: int, number: int, context: list[int], tokens: int = 12) -> Request:
    return Request(
        uid=f"p{gid}",
        owner=SampleKey(gid, 0),
        turn=number,
        prompt_ids=context,
        params=SamplingParams(max_new_tokens=tokens),
        may_continue=True,
    )


def drain(engine: NativeEngine) -> dict[int, Response]:
    done: dict[int, Response] = {}
    while True:
        output = engine.step()
        done |= {completion.request.owner.gid: completion for completion in output.finished}
        if not output.num_running and not output.num_waiting:
            return done


def play(engine: NativeEngine, num_episodes: int, num_turns: int, seed: int = 0) -> list[Response]:
    """Episodes that share their system prompt, some turns of which begin before others have ended."""
    rng = random.Random(seed)
    contexts = {gid: [*SYSTEM, gid] for gid in range(num_episodes)}
    numbers, found = dict.fromkeys(contexts, 0), []
    while contexts:
        for gid in rng.sample(sorted(contexts), max(1, len(contexts) // 2)):
            if numbers[gid] >= 0:
                engine.submit(turn(gid, numbers[gid], contexts[gid], 4 + (5 * gid + 7 * numbers[gid]) % 17))
                numbers[gid] = -numbers[gid] - 1
        for _ in range(rng.randint(1, 3)):
            for done in engine.step().finished:
                gid, number = done.request.owner.gid, done.request.turn + 1
                found.append(done)
                contexts[gid], numbers[gid] = [*done.request.prompt_ids, *done.token_ids, *HINT], number
                if number == num_turns:
                    engine.release([done.request.owner])
                    del contexts[gid]
    return sorted(found, key=lambda done: (done.request.owner.gid, done.request.turn))


@pytest.mark.parametrize("kv", ["slots", "pages"])
def test_each_of_many_episodes_finds_its_own_context(make_model: ModelMaker, kv: KVKind) -> None:
    """However many others share its first tokens."""
    engine = NativeEngine(make_model(), config=NativeConfig(kv=kv, max_running=8))
    for done in play(engine, num_episodes=24, num_turns=3):
        if done.request.turn:
            history = len(done.request.prompt_ids) - len(HINT)
            assert done.num_cached_tokens == history - 1, "all but the last token drawn, which was not computed"


@pytest.mark.parametrize("kv", ["slots", "pages"])
@pytest.mark.parametrize("max_tokens", [512, 4096])
def test_samples_are_the_same_to_the_bit_whatever_is_kept(make_model: ModelMaker, kv: KVKind, max_tokens: int) -> None:
    """Also where cells are so few that nearly all that is kept has to go, and running sequences are preempted."""
    apart = NativeConfig(kv=kv, max_tokens=max_tokens, max_running=6, prefix_cache=False)
    keeping = apart.model_copy(update={"prefix_cache": True})
    expected, found = (play(NativeEngine(make_model(), config=each), 10, 4) for each in (apart, keeping))
    assert len(found) == 40
    for one, other in zip(expected, found, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert sum(each.num_cached_tokens for each in found) > sum(each.num_cached_tokens for each in expected)


def test_what_older_weights_computed_serves_its_own_sample_alone_and_only_under_keep(make_model: ModelMaker) -> None:
    def cached(mode: str, gid: int) -> int:
        engine = NativeEngine(make_model())
        engine.submit(turn(0, 0, SYSTEM))
        answer = drain(engine)[0].token_ids
        engine.update_weights(dict(make_model(1).named_parameters()), 1, mode)  # type: ignore[arg-type]
        engine.submit(turn(gid, 1, [*SYSTEM, *answer, *HINT]))
        again = drain(engine)[gid]
        assert set(again.versions) == {1}
        engine.submit(turn(7, 0, [*SYSTEM, *answer, *HINT]))  # must not see what the other left of the old weights
        if gid == 0 and mode == "keep":
            fresh = NativeEngine(make_model(1))
            fresh.submit(turn(7, 0, [*SYSTEM, *answer, *HINT]))
            assert drain(engine)[7].logprobs == drain(fresh)[7].logprobs
        return again.num_cached_tokens

    assert cached("keep", gid=0) == len(SYSTEM) + 12 - 1
    assert cached("recompute", gid=0) == 0
    assert cached("keep", gid=5) == 0


def test_a_branch_of_a_context_of_older_weights_serves_no_other_sample(make_model: ModelMaker) -> None:
    engine, fresh = NativeEngine(make_model()), NativeEngine(make_model(1))
    engine.submit(turn(0, 0, [*SYSTEM, 1]))
    drain(engine)
    engine.update_weights(dict(make_model(1).named_parameters()), 1, "keep")
    engine.submit(turn(0, 1, [*SYSTEM, 2]))
    assert drain(engine)[0].num_cached_tokens == len(SYSTEM)
    for each in (engine, fresh):
        each.submit(turn(7, 0, [*SYSTEM, 2]))
    assert drain(engine)[7].logprobs == drain(fresh)[7].logprobs


@pytest.mark.parametrize(("kv_on_switch", "expected"), [("offload", len(SYSTEM) + 12 - 1), ("recompute", 0)])
def test_a_context_outlives_a_switch_of_the_device(make_model: ModelMaker, kv_on_switch: str, expected: int) -> None:
    engine, fresh = NativeEngine(make_model()), NativeEngine(make_model())
    engine.submit(turn(0, 0, SYSTEM))
    second = turn(0, 1, [*SYSTEM, *drain(engine)[0].token_ids, *HINT])
    engine.offload(kv_on_switch)  # type: ignore[arg-type]
    engine.onload()
    engine.submit(second)
    found = drain(engine)[0]
    fresh.submit(second)
    assert found.num_cached_tokens == expected and found.logprobs == drain(fresh)[0].logprobs


@pytest.mark.parametrize("kv", ["slots", "pages"])
def test_a_context_released_during_a_switch_keeps_its_content(make_model: ModelMaker, kv: KVKind) -> None:
    """It then serves all sequences."""
    engine, fresh = (NativeEngine(make_model(), config=NativeConfig(kv=kv)) for _ in range(2))
    engine.submit(turn(0, 0, SYSTEM))
    other = turn(1, 0, [*SYSTEM, *drain(engine)[0].token_ids, *HINT])
    engine.offload()
    engine.release([SampleKey(0, 0)])
    engine.onload()
    for each in (engine, fresh):
        each.submit(other)
    found = drain(engine)[1]
    assert found.num_cached_tokens > 0 and found.logprobs == drain(fresh)[1].logprobs


@pytest.mark.parametrize("by", ["switch", "update"])
def test_a_turn_that_was_computed_again_is_kept_like_any_other(make_model: ModelMaker, by: str) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(steps_per_schedule=1))
    engine.submit(turn(0, 0, SYSTEM))
    for _ in range(4):
        engine.step()
    if by == "switch":
        engine.offload("recompute")
        engine.onload()
    else:
        engine.update_weights(dict(make_model(1).named_parameters()), 1, "recompute")
    context = [*SYSTEM, *drain(engine)[0].token_ids]
    engine.submit(turn(0, 1, [*context, *HINT]))
    assert drain(engine)[0].num_cached_tokens == len(context) - 1


def test_turns_side_by_side_share_their_beginning(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model())
    engine.submit(turn(0, 0, SYSTEM))
    so_far = [*SYSTEM, *drain(engine)[0].token_ids]
    found = []
    for number in (1, 2):
        engine.submit(turn(0, number, [*so_far, number, 8]))
    while len(found) < 2:
        found += engine.step().finished
    assert [done.num_cached_tokens for done in found] == [len(so_far) - 1] * 2


@pytest.mark.parametrize("kv", ["slots", "pages"])
def test_another_answer_to_a_prompt_leaves_the_kept_context_to_turns_that_share_it(
    make_model: ModelMaker, kv: KVKind
) -> None:
    def play_branches(config: NativeConfig) -> dict[int, Response]:
        engine, found = NativeEngine(make_model(), config=config), dict[int, Response]()

        def run_until(number: int) -> None:
            while number not in found:
                found.update((done.request.turn, done) for done in engine.step().finished)

        engine.submit(turn(0, 0, SYSTEM, 40))
        run_until(0)
        so_far = [*SYSTEM, *found[0].token_ids]
        engine.submit(turn(0, 1, [*so_far, 1], 2))
        engine.submit(turn(0, 2, [*so_far, 2], 60))
        run_until(1)
        engine.submit(turn(0, 3, SYSTEM, 40))  # while turn 2 runs
        run_until(2)
        run_until(3)
        return found

    apart = NativeConfig(kv=kv, max_running=4, steps_per_schedule=1, draft_tokens=0, prefix_cache=False)
    expected, found = (play_branches(apart.model_copy(update={"prefix_cache": keeps})) for keeps in (False, True))
    assert found[3].num_cached_tokens == len(SYSTEM) - 1
    for number, one in expected.items():
        assert (found[number].token_ids, found[number].logprobs) == (one.token_ids, one.logprobs)


@pytest.mark.parametrize(("kv", "num_samples"), [("slots", 1), ("slots", 2), ("pages", 2)])
def test_a_turn_gets_room_if_its_context_and_those_kept_fill_the_cache(
    make_model: ModelMaker, kv: KVKind, num_samples: int
) -> None:
    config = NativeConfig(kv=kv, max_tokens=128, max_running=2)
    engine, alone = NativeEngine(make_model(), config=config), NativeEngine(make_model(), config=config)
    contexts = {}
    for gid in range(num_samples):
        engine.submit(turn(gid, 0, [gid, *SYSTEM]))
        contexts[gid] = [gid, *SYSTEM, *drain(engine)[gid].token_ids]
    for each in (engine, alone):
        each.submit(turn(0, 1, [*contexts[0], *range(30)]))
    found = []
    for _ in range(50):
        found += engine.step().finished
    assert [done.logprobs for done in found] == [drain(alone)[0].logprobs]


def test_running_sequences_go_before_what_is_kept_and_ended_samples_before_both(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(max_tokens=256, max_running=4, kv="pages"))
    contexts = {}
    for gid in range(3):
        engine.submit(turn(gid, 0, [gid, *SYSTEM]))  # 63 tokens each, in 64 cells
        contexts[gid] = [gid, *SYSTEM, *drain(engine)[gid].token_ids, *HINT]
    engine.release([SampleKey(1, 0)])
    engine.submit(turn(9, 0, [9, *SYSTEM, *SYSTEM]))  # 113 tokens in 128 cells: 64 are free
    assert drain(engine)[9].num_cached_tokens == 0
    engine.release([SampleKey(9, 0)])
    for gid, is_kept in ((0, True), (2, True), (1, False)):
        engine.submit(turn(gid, 1, contexts[gid], 1))
        assert (drain(engine)[gid].num_cached_tokens > 0) == is_kept
    assert engine.metrics()["num_preemptions"] == 0
