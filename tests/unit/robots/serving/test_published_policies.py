"""Published policies behind the server, and openpi's own client."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import interlace
from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.models.flow_vla import FlowVLAPolicy, load_flow_vla
from interlace.robots.serving.client import PolicyClient
from interlace.robots.serving.published import RequestBatches
from interlace.robots.serving.schema import ActRequest
from interlace.robots.serving.wire import RequestError
from tests.support.flow_vla_folder import CHUNK, SIZE, STATES, flow_vla_folder
from tests.support.robot_server import connect

DRAW = np.random.default_rng(0)
OBSERVATION = {
    "state": DRAW.normal(size=STATES).astype(np.float32), "front": DRAW.integers(0, 255, (48, 64, 3), np.uint8),
}  # fmt: skip
PROMPT = "reach the goal"


@pytest.fixture(scope="module", params=["smolvla", pytest.param("pi0", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / str(request.param)
    flow_vla_folder(path, str(request.param))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[interlace.Server]:
    with interlace.serve(folder, port=0, policy=True, api_key="secret") as started:
        yield started


@pytest.fixture
def client(server: interlace.Server) -> Iterator[PolicyClient]:
    with connect(server) as opened:
        yield opened


def test_a_chunk_is_the_policys(client: PolicyClient, folder: Path) -> None:
    policy = FlowVLAPolicy(load_flow_vla(folder), AutoTokenizer.from_pretrained(folder / "tokenizer"))
    noise = policy.draw_noise(np.random.default_rng(7))
    chunk = policy.network.sample(policy.sense(OBSERVATION, PROMPT), torch.from_numpy(noise[None]))[0]
    found = client.act(OBSERVATION, PROMPT, seed=7).actions
    np.testing.assert_allclose(found, policy.folder.restore_actions(chunk.numpy(), OBSERVATION["state"]), atol=1e-5)
    assert (client.schema.executed, client.schema.prefix_rule) == (2, "guided")


def test_robots_with_different_prompts_share_a_batch(client: PolicyClient) -> None:
    prompts = [PROMPT, "push the puck down and close the drawer", PROMPT]
    alone = [client.act(OBSERVATION, prompt).actions for prompt in prompts]
    futures = [client.begin(OBSERVATION, prompt) for prompt in prompts]
    for future, wanted in zip(futures, alone, strict=True):
        np.testing.assert_allclose(future.result().actions, wanted, atol=1e-5)


def test_a_request_that_fails_leaves_the_others_of_its_batch() -> None:
    """A picture of one row failed the chunks of all robots whose requests were computed in the same call."""

    def compute(requests: Sequence[ActRequest]) -> list[FloatArray]:
        if any(request.prompt == "wrong" for request in requests):
            raise ValueError("height and width must be > 0")
        return [np.full((1, 1), request.delay, np.float32) for request in requests]

    async def ask_together() -> list[object]:
        batches = RequestBatches(compute, most=3)
        none = np.zeros((0, 1), np.float32)
        prompts = ["right", "wrong", "right"]
        requests = [ActRequest(observation={}, prompt=prompt, prefix=none, delay=n) for n, prompt in enumerate(prompts)]
        try:
            return await asyncio.gather(*[batches.ask(each) for each in requests], return_exceptions=True)
        finally:
            batches.close()

    first, wrong, last = asyncio.run(ask_together())
    assert (first, last) == ([[0]], [[2]]) and str(wrong) == "height and width must be > 0"


def test_the_prefix_is_inpainted(client: PolicyClient) -> None:
    free = client.act(OBSERVATION, PROMPT).actions
    prefix = free[: CHUNK - 1] + 0.5
    found = client.act(OBSERVATION, PROMPT, prefix=prefix, delay=2).actions
    assert np.array_equal(found[:2], prefix[:2])
    assert np.abs(found[2:4] - prefix[2:4]).mean() < 0.8 * np.abs(free[2:4] - prefix[2:4]).mean()


def test_a_missing_camera_is_named(client: PolicyClient) -> None:
    with pytest.raises(RequestError, match=r"reads the camera 'front', and the request has \['prompt', 'state'\]"):
        client.act({"state": OBSERVATION["state"]}, PROMPT)
    with pytest.raises(RequestError, match="the request has no prompt"):
        client.act(OBSERVATION)
    assert client.act(OBSERVATION, PROMPT).actions.shape == (CHUNK, SIZE)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("policy_preprocessor_step_5_normalizer_processor.safetensors", "no normalisation statistics of observation"),
        ("tokenizer", "has no tokenizer. Save the tokenizer"),
        ("model.safetensors", "has no model.safetensors"),
    ],
)
def test_an_incomplete_folder_is_refused(tmp_path: Path, missing: str, words: str) -> None:
    path = tmp_path / "policy"
    flow_vla_folder(path, "pi0")
    (path / missing).rename(tmp_path / "away")
    with pytest.raises(UserError, match=words):
        interlace.serve(path, port=0, policy=True)


def test_settings_of_a_recipe_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.max_running=4 is a setting of a recipe"):
        interlace.serve(folder, ["rollout.max_running=4"], port=0, policy=True)


def test_openpis_client_works_unchanged(server: interlace.Server) -> None:
    pytest.importorskip("websockets")
    policies = pytest.importorskip("openpi_client.websocket_client_policy")
    client = policies.WebsocketClientPolicy(server.url, api_key="secret")
    metadata = client.get_server_metadata()
    assert metadata["actions"]["shape"] == [CHUNK, SIZE]
    found = client.infer({**OBSERVATION, "prompt": PROMPT, "seed": 7})
    with connect(server) as own:
        assert np.array_equal(found["actions"], own.act(OBSERVATION, PROMPT, seed=7).actions)
    with pytest.raises(RuntimeError, match=r"state has shape \[2\]"):
        client.infer({**OBSERVATION, "state": np.zeros(2, np.float32), "prompt": PROMPT})
    assert client.infer({**OBSERVATION, "prompt": PROMPT})["actions"].shape == (CHUNK, SIZE)
    assert found["server_timing"]["infer_ms"] > 0
