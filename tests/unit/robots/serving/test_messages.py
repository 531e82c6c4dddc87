"""Messages of the policy server: the encoding of openpi's client, and requests that do not fit the schema."""

import msgpack
import numpy as np
import pytest

from interlace.robots.serving.schema import ArrayField, PolicySchema, read_act, read_intervention, read_kind
from interlace.robots.serving.wire import Message, RequestError, pack, unpack

SCHEMA = PolicySchema(
    policy="tiny", control_hz=10, executed=4, prefix_rule="forced", known_instructions=("push the puck",),
    observation={
        "state": ArrayField(shape=(3,), dtype="float32"), "image": ArrayField(shape=(-1, -1, 3), dtype="uint8"),
    },
    actions=ArrayField(shape=(4, 2), dtype="float32"),
)  # fmt: skip
GOOD: Message = {"state": np.zeros(3, np.float32), "image": np.zeros((6, 5, 3), np.uint8)}


def test_arrays_come_back() -> None:
    sent = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.uint8([[1, 2]]), "c": "text", "d": {"e": [1.5]}}
    found = unpack(pack({**sent, "f": np.float32(0.5), "g": np.zeros((0, 2), np.float32)}))
    assert np.array_equal(found["a"], sent["a"]) and found["b"].dtype == np.uint8  # type: ignore[union-attr,arg-type]
    assert (found["c"], found["d"], found["f"]) == ("text", {"e": [1.5]}, np.float32(0.5))
    assert found["g"].shape == (0, 2)  # type: ignore[union-attr]


def encoded(**changes: object) -> bytes:
    array = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb({"state": array | {name.encode(): value for name, value in changes.items()}})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xc1", "not a map in msgpack"),
        (msgpack.packb([1, 2]), "is of type list"),
        (msgpack.packb({b"state": 1}), "keys are texts"),
        (encoded(dtype="|O"), r"type '\|O'"),
        (encoded(dtype="no such"), "type 'no such'"),
        (encoded(dtype="f4,f4"), "type 'f4,f4'"),
        (encoded(shape=[3]), r"shape \[3\] and type float32 has 8 bytes"),
        (encoded(shape=[-1, -2]), "sizes are whole numbers"),
        (encoded(shape=[2**62, 4]), r"has 8 bytes"),
        (encoded(shape="long"), "needs `data` in bytes and a `shape`"),
        (encoded(data="text"), "needs `data` in bytes and a `shape`"),
        (msgpack.packb({"seed": {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}}), "does not fit uint8"),
        (b"\x91" * 5000, "not a map in msgpack"),
    ],
)
def test_damaged_messages(data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        unpack(data)


def test_a_request_is_read() -> None:
    found = read_act({**GOOD, "prefix": np.ones((3, 2)), "delay": 2, "seed": 7, "last_action": np.zeros(2)}, SCHEMA)
    assert (found.prompt, found.delay, found.seed, found.prefix.dtype) == ("push the puck", 2, 7, np.float32)
    assert found.observation["image"].shape == (6, 5, 3)
    assert read_act({**GOOD, "state": np.zeros(3), "prompt": "reach"}, SCHEMA).observation["state"].dtype == np.float32
    assert read_kind({}) == "act"


NAN = np.array([0, np.nan, 0], np.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": None}, r"reads the camera 'image', and the request has \['image', 'state'\]"),
        ({"state": np.zeros(4, np.float32)}, r"state has shape \[4\], and the policy reads \[3\]"),
        ({"state": np.zeros((1, 3), np.float32)}, r"state has shape \[1, 3\]"),
        ({"state": np.zeros(3, np.int64)}, "state has the type int64, and the policy reads float32"),
        ({"state": [0.0, 0.0, 0.0]}, "state is list: send an array of float32"),
        ({"state": NAN}, r"state\[1\] is nan: numbers must be finite"),
        ({"state": np.array([0, 0, 1e300])}, r"state\[2\] is 1e\+300: numbers must be finite in float32"),
        ({"last_action": np.full(2, -1e39)}, r"last_action\[0\] is -1e\+39: numbers must be finite in float32"),
        ({"image": np.zeros((6, 5, 3), np.float32)}, "image has the type float32, and the policy reads uint8"),
        ({"image": np.zeros((6, 5), np.uint8)}, r"image has shape \[6, 5\], and the policy reads \[-1, -1, 3\]"),
        ({"image": np.zeros((0, 5, 3), np.uint8)}, r"image has shape \[0, 5, 3\]"),
        ({"imag": 1}, "unknown key 'imag'. Did you mean 'image'"),
        ({"prompt": ""}, "prompt must be a text"),
        ({"prompt": 3}, "prompt must be a text"),
        ({"prefix": np.zeros((5, 2), np.float32)}, "prefix has 5 actions, and a chunk of the policy 4"),
        ({"prefix": np.zeros((2, 3), np.float32)}, r"prefix has shape \[2, 3\]"),
        ({"prefix": np.full((2, 2), np.inf, np.float32)}, r"prefix\[0, 0\] is inf"),
        ({"prefix": np.zeros((2, 2), np.float32), "delay": 3}, "delay=3 actions are committed, and prefix has 2"),
        ({"prefix": np.zeros((4, 2), np.float32), "delay": 4}, "delay is 4: it must be a whole number from 0 to 3"),
        ({"delay": True}, "delay is True"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_requests_that_do_not_fit(changes: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_act({**GOOD, **changes}, SCHEMA)  # type: ignore[arg-type]


def test_real_time_chunking_of_single_actions_is_refused() -> None:
    single = SCHEMA.model_copy(update={"actions": ArrayField(shape=(1, 2), dtype="float32")})
    assert read_act({**GOOD, "prefix": np.zeros((0, 2), np.float32), "delay": 0}, single).delay == 0
    for changes in ({"prefix": np.zeros((1, 2), np.float32)}, {"delay": 1}):
        with pytest.raises(RequestError, match="the policy gives one action per request"):
            read_act({**GOOD, **changes}, single)  # type: ignore[arg-type]


def test_interventions_that_do_not_fit() -> None:
    arrays = {name: np.stack([array] * 5) for name, array in GOOD.items()}  # type: ignore[type-var,arg-type]
    good = {**arrays, "kind": "intervention", "actions": np.zeros((5, 2), np.float32)}
    found = read_intervention({**good, "rewards": np.zeros(5), "terminated": True, "success": True}, SCHEMA)
    assert found.terminated is not None and found.terminated.tolist() == [False] * 4 + [True]
    for changes, words in (
        ({"actions": np.zeros((4, 2), np.float32)}, r"state has shape \[5, 3\], and the policy reads \[4, 3\]"),
        ({"actions": np.zeros((0, 2), np.float32)}, "actions of the intervention are empty"),
        ({"rewards": np.zeros(4)}, r"rewards has shape \[4\]"),
        ({"success": 1}, "success is int: send true or false"),
    ):
        with pytest.raises(RequestError, match=words):
            read_intervention({**good, **changes}, SCHEMA)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="kind 'stop': known are act and intervention"):
        read_kind({"kind": "stop"})
    with pytest.raises(RequestError, match="known are act and intervention"):
        read_kind({"kind": np.zeros(2)})
