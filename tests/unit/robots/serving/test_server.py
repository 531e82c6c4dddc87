"""The policy server over loopback: chunks of all heads, real-time chunking, keys, mistakes of clients."""

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import interlace
from interlace.core.errors import UserError
from interlace.robots.envs.fleet import read_spec
from interlace.robots.episodes.robot import RobotConfig, policy_actions
from interlace.robots.serving.client import ConnectionLostError, PolicyClient
from interlace.robots.serving.policy import describe_turns
from interlace.robots.serving.wire import RequestError, pack
from interlace.run.host import policy_actions_of
from tests.support.robot_server import (
    CHUNK,
    HEADS,
    RULES,
    connect,
    decode_greedily,
    dot_observation,
    load,
    play_greedy,
    serving,
)

SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[pytest.param(head, marks=SLOW if head in ("squashed", "parallel") else ()) for head in HEADS],
)
def head(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(head: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[interlace.Server]:
    with serving(head, tmp_path_factory.mktemp(head), "policy.control_hz=20") as started:
        yield started


@pytest.fixture
def client(server: interlace.Server) -> Iterator[PolicyClient]:
    with connect(server) as opened:
        yield opened


def test_a_served_chunk_is_the_turn_of_an_episode(client: PolicyClient, head: str, tmp_path: Path) -> None:
    observations, chunks = play_greedy(load(head, tmp_path))
    assert len(chunks) == 3
    for observation, chunk in zip(observations, chunks, strict=False):  # the last one is only valued
        assert np.array_equal(client.act(observation).actions, np.clip(chunk, -1, 1))


def test_the_committed_actions_are_the_first_of_the_chunk(client: PolicyClient, head: str) -> None:
    free = client.act(dot_observation()).actions
    prefix = np.linspace(-0.9, 0.9, 6, dtype=np.float32)[:, None]
    for delay in (0, 1, 4, 6):
        found = client.act(dot_observation(), prefix=prefix, delay=delay).actions
        assert found.shape == (CHUNK, 1) and np.array_equal(found[:delay], prefix[:delay])
        again = client.act(dot_observation(), prefix=free, delay=delay).actions
        if RULES[head] == "overwritten":
            assert np.array_equal(found[delay:], free[delay:])
        if RULES[head] != "guided":
            assert np.array_equal(again, free), "a chunk continues its own beginning unchanged"
    assert client.schema.prefix_rule == RULES[head]


def test_the_rest_of_a_forced_chunk_is_decoded_after_the_committed_actions(
    client: PolicyClient, head: str, tmp_path: Path
) -> None:
    if RULES[head] != "forced":
        pytest.skip("only tokens that are decoded one by one are forced")
    recipe, free = load(head, tmp_path), client.act(dot_observation()).actions
    actions, differ = policy_actions(policy_actions_of(recipe)), []
    prefix = np.linspace(0.9, -0.9, 6, dtype=np.float32)[:, None]
    for delay in (1, 3, 6):
        begun = actions.encode(prefix[:delay]).tolist()
        expected = actions.decode(decode_greedily(recipe, begun, dot_observation()))
        found = client.act(dot_observation(), prefix=prefix, delay=delay).actions
        np.testing.assert_array_equal(found[:delay], prefix[:delay])
        np.testing.assert_array_equal(found[delay:], expected[delay:])
        differ.append(not np.array_equal(found[delay:], free[delay:]))
    assert any(differ), "the committed actions change the others"


def test_a_limit_of_the_change_keeps_the_bounds_of_the_actions(tmp_path: Path) -> None:
    with serving("tokens", tmp_path, "policy.limits.max_change=[0.5]") as server, connect(server) as client:
        limits = client.schema.applied_limits
        assert limits is not None and (limits.low, limits.high, limits.max_change) == ((-1.0,), (1.0,), (0.5,))


def test_a_simulator_with_one_bound_keeps_it(tmp_path: Path) -> None:
    """The server dropped the bounds of all numbers of an action if one of them had none."""
    recipe = load("tokens", tmp_path)
    assert isinstance(recipe.episode, RobotConfig)
    given = {"instructions": (), "control_hz": 10.0}
    actions, spec = policy_actions(policy_actions_of(recipe)), read_spec(recipe.episode.env)
    free = np.array([np.inf], np.float32)
    for low, high, wanted in (
        (-np.ones(1, np.float32), free, ((-1,), (np.finfo(np.float32).max,))),
        (-free, free, ((), ())),
    ):
        own = replace(spec, action=replace(spec.action, low=low, high=high))
        schema = describe_turns("policy", recipe.episode, own, actions, **given)
        assert (schema.low, schema.high) == wanted


def test_a_guided_chunk_stays_near_the_prefix(client: PolicyClient, head: str) -> None:
    if head != "flow":
        pytest.skip("only flow matching is guided")
    free = client.act(dot_observation()).actions
    prefix = np.full((6, 1), 0.8, np.float32)
    found = client.act(dot_observation(), prefix=prefix, delay=2).actions
    assert np.abs(found[2:4] - 0.8).max() < 0.7 * np.abs(free[2:4] - 0.8).max()


def test_robots_act_concurrently(server: interlace.Server, client: PolicyClient) -> None:
    states = [dot_observation(at) for at in np.linspace(-0.5, 0.5, 6)]
    alone = [client.act(state).actions for state in states]
    with ThreadPoolExecutor(6) as threads:
        clients = [connect(server) for _ in states]
        together = list(threads.map(lambda pair: pair[0].act(pair[1]).actions, zip(clients, states, strict=True)))
        for one in clients:
            one.close()
    assert all(np.array_equal(*pair) for pair in zip(alone, together, strict=True))


def get(server: interlace.Server, path: str, key: str) -> dict[str, object]:
    address = server.url.replace("ws://", "http://") + path
    with urllib.request.urlopen(urllib.request.Request(address, headers={"x-api-key": key})) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def test_the_schema_is_published(server: interlace.Server, client: PolicyClient) -> None:
    found = get(server, "/schema", server.api_key)
    assert found == client.schema.model_dump(mode="json")
    assert found["observation"] == {
        "state": {"shape": [2], "dtype": "float32", "units": "as in tests.support.dot_simulator:Dot"}
    }
    assert (client.schema.chunk, client.schema.size, client.schema.control_hz) == (CHUNK, 1, 20)
    assert (client.schema.low, client.schema.known_instructions) == ((-1,), ("push the puck down",))
    client.act(dot_observation())
    assert 0 < get(server, "/stats", server.api_key)["latency_p99_s"] < 5  # type: ignore[operator]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(server, "/schema", "other")


def test_a_wrong_key_is_refused(server: interlace.Server) -> None:
    with pytest.raises(UserError, match="refuses the connection: the key is not the server's"):
        PolicyClient(server.url, "other")
    with pytest.raises(UserError, match="cannot be reached"):
        PolicyClient("ws://127.0.0.1:9", "other")


def test_mistakes_are_answered_and_the_server_lives(server: interlace.Server, client: PolicyClient) -> None:
    for observation, options, words in (
        ({}, {}, r"reads the array 'state', and the request has \[\]"),
        ({"state": np.zeros(3, np.float32)}, {}, r"state has shape \[3\], and the policy reads \[2\]"),
        ({"state": np.array([np.nan, 0], np.float32)}, {}, r"state\[0\] is nan"),
        (dot_observation(), {"prefix": np.zeros((4, 3), np.float32)}, r"prefix has shape \[4, 3\]"),
        (dot_observation(), {"prompt": " "}, "prompt must be a text"),
        (dot_observation(), {"prompt": "push " * 600}, "prompt|context|longer"),
    ):
        with pytest.raises(RequestError, match=words):
            client.act(observation, **options)  # type: ignore[arg-type]
        assert client.act(dot_observation()).actions.shape == (CHUNK, 1)


async def send(server: interlace.Server, *messages: bytes | str) -> list[object]:
    """Sends raw messages. Returns the answers, or the code with which the server closed the connection."""
    import aiohttp

    headers = {"Authorization": f"Api-Key {server.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(server.url) as socket:
        await socket.receive_bytes()
        found: list[object] = []
        for message in messages:
            await (socket.send_str(message) if isinstance(message, str) else socket.send_bytes(message))
            answer = await socket.receive()
            found.append(socket.close_code if answer.type is aiohttp.WSMsgType.CLOSE else answer.data)
        return found


def test_raw_messages(server: interlace.Server, client: PolicyClient) -> None:
    most = client.schema.max_message_bytes
    text, damaged, large, good = asyncio.run(
        send(server, "hello", b"\xc1\xff", bytes(most + 1), pack(dot_observation()))  # type: ignore[arg-type]
    )
    assert text == "the request is text: send a map in msgpack, as binary data."
    assert "not a map in msgpack" in str(damaged)
    assert str(large).startswith(f"the message has {most + 1} bytes, and the server takes {most}")
    assert isinstance(good, bytes), "the connection stays open"
    with contextlib.suppress(ConnectionError):  # the server may close before it has read all
        assert asyncio.run(send(server, bytes(4 * most + 1))) == [1009], "a far too large message ends the connection"
    with pytest.raises(RequestError, match=f"and the server takes {most}"):
        client.act({"state": np.zeros(most, np.float32)})
    assert client.act(dot_observation()).actions.shape == (CHUNK, 1)


def test_a_client_says_that_the_connection_has_ended(server: interlace.Server) -> None:
    opened = connect(server)
    asyncio.run_coroutine_threadsafe(opened._socket.close(), opened._thread.loop).result()  # type: ignore[union-attr]
    with pytest.raises(ConnectionLostError, match="has ended"):
        opened.act(dot_observation())
    opened.close()
