"""Tiny folders of SmolVLA, pi0 and pi0.5: weights, preparation, attention, sampling, densities."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GemmaConfig, GemmaModel, LlamaConfig, LlamaModel

from interlace.core.errors import UserError
from interlace.models.config import FlowConfig
from interlace.robots.models.flow_vla import FlowVLA, FlowVLAPolicy, Sensed, load_flow_vla, time_features
from interlace.robots.models.lerobot_folder import read_folder
from tests.support.flow_vla_folder import CHUNK, GEMMA, LAYERS, PADDED, SIZE, STATES, TEXT, flow_vla_folder

KINDS = ["smolvla", "pi0", "pi05"]
DRAW = np.random.default_rng(0)
OBSERVATION = {
    "state": DRAW.normal(size=STATES).astype(np.float32), "front": DRAW.integers(0, 255, (48, 64, 3), np.uint8),
}  # fmt: skip


def policy(folder: Path, kind: str) -> tuple[FlowVLAPolicy, dict[str, torch.Tensor]]:
    weights = flow_vla_folder(folder, kind)
    return FlowVLAPolicy(load_flow_vla(folder), AutoTokenizer.from_pretrained(folder / "tokenizer")), weights


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_acts_and_executes_its_chunk(tmp_path: Path, kind: str) -> None:
    made, _ = policy(tmp_path / kind, kind)
    draw = np.random.default_rng(3)
    first, second, third = (made.act(OBSERVATION, "reach the goal", draw) for _ in range(3))
    again, start = np.random.default_rng(3), made.network.schedule
    x = torch.from_numpy(again.normal(size=(1, CHUNK, PADDED)).astype(np.float32))
    sensed = made.sense(OBSERVATION, "reach the goal")
    prefix = made.network.read(sensed)
    with torch.no_grad():
        for step in range(4):  # Euler from time 1 to 0 in four steps
            x = x - 0.25 * made.network.velocity(prefix, x, torch.tensor([1 - step * 0.25]))
    wanted = made.folder.restore_actions(x[0].numpy(), OBSERVATION["state"])
    np.testing.assert_allclose([first, second], wanted[:2], atol=1e-5)
    assert first.shape == (SIZE,) and start.config.steps == 4
    assert not np.allclose(third, wanted[2]), "after n_action_steps actions the policy is asked again"


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
@torch.no_grad()
def test_the_prefix_is_read_as_by_transformers(tmp_path: Path, kind: str) -> None:
    made, weights = policy(tmp_path / kind, kind)
    network = made.network
    part = (
        "vlm_with_expert.vlm.model.text_model."
        if kind == "smolvla"
        else "paligemma_with_expert.paligemma.model.language_model."
    )
    model = LlamaModel(LlamaConfig(**TEXT)) if kind == "smolvla" else GemmaModel(GemmaConfig(**GEMMA))
    own = {name.split(part)[1]: tensor for name, tensor in weights.items() if part in name}
    missing = model.load_state_dict(own, strict=False).missing_keys
    assert not [name for name in missing if "embed_tokens" not in name]
    rows = noise(2, 7, 64)
    mask = torch.zeros(2, 1, 7, 7).masked_fill(torch.rand(2, 1, 7, 7) < 0.3, torch.finfo(torch.float32).min)
    mask[..., 0] = 0
    scale = 64**0.5 if kind == "pi0" and _scales(model) else 1.0
    cache = model(inputs_embeds=rows / scale, attention_mask=mask, use_cache=True).past_key_values
    found = network.text.read(rows, torch.arange(7).expand(2, -1), mask[:, 0] == 0)
    for (key, value), layer in zip(found, cache.layers, strict=True):
        torch.testing.assert_close(key.transpose(1, 2), layer.keys, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(value.transpose(1, 2), layer.values, atol=2e-4, rtol=1e-4)


def _scales(model: GemmaModel) -> bool:
    """Whether this version multiplies given embeddings, and not those that it looks up alone."""
    import inspect

    return "normalizer" in inspect.getsource(type(model).forward)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_action_tokens_attend_as_each_policy_defines(tmp_path: Path, kind: str) -> None:
    made, _ = policy(tmp_path / kind, kind)
    sensed, x = made.sense(OBSERVATION, "reach the goal"), noise(1, CHUNK, PADDED)
    changed = x.clone()
    changed[0, -1] += 1
    prefix, time = made.network.read(sensed), torch.tensor([0.5])
    before, after = (made.network.velocity(prefix, each, time)[0] for each in (x, changed))
    reaches_back = not torch.allclose(before[:-1], after[:-1], atol=1e-6)
    assert reaches_back is (kind != "smolvla"), "SmolVLA's action tokens are causal, those of pi0 see each other"
    assert not torch.allclose(before, made.network.velocity(prefix, x, torch.tensor([0.6]))[0]), "time matters"


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_text_and_pictures_do_not_see_the_state_token(tmp_path: Path, kind: str) -> None:
    made, _ = policy(tmp_path / kind, kind)
    sensed = made.sense(OBSERVATION, "reach the goal")
    other = Sensed(pictures=sensed.pictures, token_ids=sensed.token_ids, is_real=sensed.is_real, state=sensed.state + 1)
    one, two = made.network.read(sensed), made.network.read(other)
    assert len(one.layers) == LAYERS
    last = one.is_real.shape[1] - (kind == "smolvla")
    torch.testing.assert_close(one.layers[-1][0][:, :last], two.layers[-1][0][:, :last])
    x = noise(1, CHUNK, PADDED)
    differ = [made.network.velocity(each, x, torch.tensor([1.0])) for each in (one, two)]
    assert torch.allclose(*differ) is (kind == "pi05"), "pi0.5 alone has the state in its text"


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_the_prompt_changes_nothing(tmp_path: Path, kind: str) -> None:
    made, _ = policy(tmp_path / kind, kind)
    sensed, start = made.sense(OBSERVATION, "reach the goal"), noise(1, CHUNK, PADDED)
    padded = Sensed(
        pictures=sensed.pictures, state=sensed.state, token_ids=torch.nn.functional.pad(sensed.token_ids, (0, 5)),
        is_real=torch.nn.functional.pad(sensed.is_real, (0, 5)),
    )  # fmt: skip
    torch.testing.assert_close(
        made.network.sample(sensed, start), made.network.sample(padded, start), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("sampler", ["sde", "noise"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_a_chain_are_those_that_it_was_drawn_with(tmp_path: Path, kind: str, sampler: str) -> None:
    flow_vla_folder(tmp_path / kind, kind)
    network = load_flow_vla(tmp_path / kind, FlowConfig(sampler=sampler)).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / kind / "tokenizer")
    sensed = FlowVLAPolicy(network, tokenizer).sense(OBSERVATION, "reach the goal")
    chain, drawn = network.draw(sensed, noise(1, 5, CHUNK, PADDED))
    found = network.logprobs(sensed, chain)
    torch.testing.assert_close(found, drawn, atol=1e-5, rtol=0)
    assert (found[..., SIZE:] == 0).all() and (found[..., :SIZE] != 0).all()
    found.sum().backward()
    gradients = [parameter.grad for name, parameter in network.named_parameters() if name.startswith("expert.layers")]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    # Once more with each step written out: the density of a normal step at the folder's four times.
    prefix, t, d = network.read(sensed), 1.0, 0.25
    v = network.velocity(prefix, chain[:, 0], torch.tensor([t])).detach()
    s = network.schedule.config.noise_level * (t / (1 - (t - d))) ** 0.5
    x0, x1 = chain[:, 0] - v * t, chain[:, 0] + v * (1 - t)
    mean, std = x0 * (1 - (t - d)) + x1 * (t - d - s * s * d / (2 * t)), s * d**0.5
    if sampler == "noise":
        mean, std = chain[:, 0] - v * d, (0.08 + 0.16) / 2
    wanted = torch.distributions.Normal(mean, std).log_prob(chain[:, 1])
    torch.testing.assert_close(found[:, 1, :, :SIZE].detach(), wanted[..., :SIZE], atol=1e-4, rtol=1e-4)


def test_prompts_and_states_are_written_as_each_policy_was_trained(tmp_path: Path) -> None:
    made = {kind: policy(tmp_path / kind, kind)[0].folder for kind in KINDS}
    state = np.array([-1.0, 0.0, 0.999, 0.5, -0.5], np.float32)
    assert made["smolvla"].prompt("pick_up the cube", state) == "pick_up the cube\n"
    assert made["pi0"].prompt(" pick_up\nthe cube ", state) == "pick up the cube\n"
    assert made["pi05"].prompt("pick_up the cube", state) == (
        "Task: pick up the cube, State: 0 128 255 192 64 128 128 128;\nAction: "
    )
    mean_std, quantiles = made["smolvla"].action, made["pi05"].action
    given = np.array([[0.5, -1.0, 1.0]], np.float32)
    np.testing.assert_allclose(mean_std.restore(given), given * mean_std.second + mean_std.first, atol=1e-6)
    np.testing.assert_allclose(quantiles.restore(given), [[0.25, -2.0, 3.0]], atol=1e-6)
    for normalizer in (mean_std, quantiles):
        np.testing.assert_allclose(normalizer.normalize(normalizer.restore(given)), given, atol=1e-5)
    picture = made["smolvla"].picture(np.full((48, 64, 3), 255, np.uint8))
    assert picture.shape == (3, 64, 64) and picture[:, 0].max() == -1 and picture[:, -1].min() == 1


def test_times_become_sines_of_periods_between_4_ms_and_4_s() -> None:
    found = time_features(torch.tensor([0.3]), 6)[0].numpy()
    periods = 4e-3 * (4.0 / 4e-3) ** np.array([0, 0.5, 1])
    np.testing.assert_allclose(
        found, np.r_[np.sin(2 * np.pi * 0.3 / periods), np.cos(2 * np.pi * 0.3 / periods)], atol=1e-4
    )


def test_a_robot_sends_no_pictures_of_empty_cameras(tmp_path: Path) -> None:
    flow_vla_folder(tmp_path / "pi0", "pi0")
    file = tmp_path / "pi0" / "config.json"
    settings = json.loads(file.read_text())
    picture = settings["input_features"]["observation.images.front"]
    settings["input_features"] |= {f"observation.images.empty_camera_{number}": picture for number in range(2)}
    for count, wanted in ((0, ("front", "empty_camera_0", "empty_camera_1")), (1, ("front", "empty_camera_1"))):
        file.write_text(json.dumps(settings | {"empty_cameras": count}))
        assert read_folder(tmp_path / "pi0").cameras == wanted


def test_actions_relative_to_the_state_are_restored_as_in_lerobot(tmp_path: Path) -> None:
    made, _ = policy(tmp_path / "pi0", "pi0")
    plain = made.folder
    numbers, state = noise(CHUNK, PADDED).numpy(), np.array([5, -7, 9, 2, 2], np.float32)
    file = tmp_path / "pi0" / "policy_preprocessor.json"
    pipeline = json.loads(file.read_text())
    for given, offset in (
        ({"enabled": False, "exclude_joints": [], "action_names": None}, [0, 0, 0]),
        ({"enabled": True, "exclude_joints": [], "action_names": None}, [5, -7, 9]),
        ({"enabled": True, "exclude_joints": ["Gripper"], "action_names": ["a", "left_gripper.pos", "b"]}, [5, 0, 9]),
        ({"enabled": True, "exclude_joints": ["gripper"], "action_names": None}, [5, -7, 9]),
    ):
        step = {"registry_name": "relative_actions_processor", "config": given}
        file.write_text(json.dumps({**pipeline, "steps": [step, *pipeline["steps"]]}))
        found = read_folder(tmp_path / "pi0")
        wanted = plain.restore_actions(numbers, state) + np.array(offset, np.float32)
        actions = found.restore_actions(numbers, state)
        np.testing.assert_allclose(actions, wanted, atol=1e-6)
        np.testing.assert_allclose(found.normalize_actions(actions, state), numbers[:, :SIZE], atol=1e-4)
    acting = FlowVLAPolicy(load_flow_vla(tmp_path / "pi0"), AutoTokenizer.from_pretrained(tmp_path / "pi0/tokenizer"))
    first, other = (each.act(OBSERVATION, "reach", np.random.default_rng(0)) for each in (acting, made))
    np.testing.assert_allclose(first - other, OBSERVATION["state"][:SIZE], atol=1e-5)


def damaged(folder: Path, kind: str, what: str) -> None:
    flow_vla_folder(folder, kind)
    if what == "statistics":
        (folder / "policy_preprocessor_step_5_normalizer_processor.safetensors").unlink()
    changes = {
        "vlm": {"vlm_model_name": "HuggingFaceTB/SmolVLM2"}, "type": {"type": "act"},
        "aloha": {"adapt_to_pi_aloha": True}, "memory": {"use_proprioceptive_memory": True},
        "relative": {"use_relative_actions": True}, "oblong": {"resize_imgs_with_padding": [512, 384]},
        "tokens": {"add_image_special_tokens": True},
    }  # fmt: skip
    if what in changes:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes[what]))


@pytest.mark.parametrize(
    ("kind", "what", "words"),
    [
        ("pi0", "statistics", r"no normalisation statistics of observation.state \(mean and std in policy_pre"),
        ("smolvla", "vlm", r"names its language model 'HuggingFaceTB/SmolVLM2' .* Copy config.json"),
        ("pi0", "type", r"names type 'act'. Known flow-matching policies: smolvla, pi0, pi05"),
        ("smolvla", "aloha", r"adapt_to_pi_aloha=true .* converts the joints of ALOHA .* not supported"),
        ("smolvla", "oblong", r"reads pictures of 512 x 384 pixels, and only squares"),
        ("smolvla", "tokens", r"add_image_special_tokens=true .* special tokens around pictures"),
        ("pi05", "memory", r"use_proprioceptive_memory=true .* reads earlier states"),
        ("pi0", "relative", r"use_relative_actions=true .* has no relative_actions_processor"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path: Path, kind: str, what: str, words: str) -> None:
    damaged(tmp_path / kind, kind, what)
    with pytest.raises(UserError, match=words):
        load_flow_vla(tmp_path / kind)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", {"output_features": {"action": {"shape": []}}}, r"config.json: output_features.action.shape"),
        ("config.json", {"output_features": {"action": {}}}, r"missing key 'output_features.action.shape'"),
        (
            "config.json",
            {"output_features": {"action": {"shape": [5]}}},
            r"action have 3 numbers, and its config.json 5",
        ),
        ("config.json", {"input_features": None}, r"input_features = None: it must be a mapping"),
        (
            "config.json",
            {"input_features": {"observation.state": {"shape": [9]}}},
            r"statistics of observation.state have 5 numbers, and its config.json 9",
        ),
        ("config.json", {"chunk_size": 0}, r"chunk_size = 0: it must be more than 0"),
        ("config.json", {"n_action_steps": 0}, r"n_action_steps = 0: it must be more than 0"),
        ("config.json", {"max_action_dim": 2}, r"actions have 3 numbers, and max_action_dim=2"),
        ("config.json", {"image_resolution": [0, 0]}, r"image_resolution.0 = 0: it must be more than 0"),
        ("policy_preprocessor.json", {"steps": None}, r"policy_preprocessor.json: steps = None: it must be a list"),
        ("policy_preprocessor.json", {"steps": [{"registry_name": "normalizer_processor"}]}, r"with a norm_map"),
        ("model.safetensors", None, r"model.safetensors is damaged"),
        ("policy_preprocessor_step_5_normalizer_processor.safetensors", None, r"processor.safetensors is damaged"),
    ],
)
def test_a_damaged_folder_is_refused_by_its_file(
    tmp_path: Path, file: str, change: dict[str, object] | None, words: str
) -> None:
    flow_vla_folder(tmp_path / "pi0", "pi0")
    path = tmp_path / "pi0" / file
    if change is None:
        path.write_bytes(path.read_bytes()[:4])
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=words):
        load_flow_vla(tmp_path / "pi0")


def test_a_camera_that_the_simulator_lacks_is_named(tmp_path: Path) -> None:
    made, _ = policy(tmp_path / "pi0", "pi0")
    assert isinstance(made.network, FlowVLA)
    with pytest.raises(UserError, match=r"reads the camera 'front', and the simulator gives \['state'\]"):
        made.sense({"state": OBSERVATION["state"]}, "reach the goal")
