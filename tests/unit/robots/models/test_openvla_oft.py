"""OpenVLA-OFT's folders: their parts load, and a chunk is decoded as the paper describes, in both engines."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from interlace.core.errors import UserError
from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import TrainEngine, sft_loss
from interlace.engines.train.config import OptimizerConfig, TrainConfig
from interlace.engines.train.export import save_model
from interlace.models.action_tokens import ActionTokens, action_tokens
from interlace.models.config import ModelConfig
from interlace.models.inputs import StateScaling
from interlace.models.loading import LoadedModel, load_model
from interlace.robots.envs.load import find_family
from interlace.robots.episodes.robot import RobotConfig, check_spaces, policy_actions
from interlace.robots.models.openvla import OpenVLAForCausalLM
from interlace.robots.models.openvla_config import OpenVLAConfig
from interlace.rollouts.envs.spec import ActionSpec, ArraySpec, EnvSpec
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import recipe_prompts
from tests.support.openvla_folder import MEANS, SIDE, STDS
from tests.support.openvla_oft_folder import (
    ACTION,
    CHUNK,
    DATA_SET,
    HIDDEN,
    PROMPT_END,
    PROPRIO,
    SIZE,
    STATE,
    observation,
    openvla_oft_folder,
    regressed,
    simulator_actions,
)
from tests.unit.engines.test_arrays_beside_tokens import sample_of, serve

ROOT = Path(__file__).parents[4]
NUM = CHUNK * SIZE
PROMPT = [7, 21, 22, 23]


def loaded(folder: Path, *, head: bool = True) -> tuple[LoadedModel, ActionTokens, dict[str, dict[str, torch.Tensor]]]:
    parts = openvla_oft_folder(folder, head=head)
    model = load_model(ModelConfig(path=str(folder)))
    tokens = action_tokens(model.model.config)
    assert tokens is not None
    return model, tokens, parts


def asked(tokens: ActionTokens, index: int = 0, temperature: float = 0.0) -> Request:
    # The pictures' preparation has a test elsewhere (test_published_policies.py).
    arrays = replace(tokens.reads, pictures=None).prepare(observation())
    return Request(
        uid="robot", owner=SampleKey(NO_GROUP, index), prompt_ids=tokens.context(PROMPT), inputs=arrays,
        query_ids=tokens.query_ids, params=SamplingParams(max_new_tokens=NUM, temperature=temperature),
    )  # fmt: skip


def hidden_states(model: LoadedModel, parts: dict[str, dict[str, torch.Tensor]]) -> torch.Tensor:
    """Hidden states [56, H] that the numbers are read from, by the description of the sequence."""
    seen, body = observation(), model.model.model
    weights = parts["proprio_projector"]
    share = (seen["state"] - np.array(STATE["q01"])) / (np.array(STATE["q99"]) - np.array(STATE["q01"]) + 1e-8)
    state = torch.from_numpy(np.clip(2 * share - 1, -1, 1).astype(np.float32))
    state = torch.nn.functional.gelu(state @ weights["module.fc1.weight"].T + weights["module.fc1.bias"])
    state = state @ weights["module.fc2.weight"].T + weights["module.fc2.bias"]
    patches = []
    for name in ("image", "wrist_image"):
        features = [
            tower(torch.from_numpy(((seen[name][None] / 255 - mean) / std).astype(np.float32)).permute(0, 3, 1, 2))
            for tower, mean, std in zip(body.projector.vision_backbone.children(), MEANS, STDS, strict=True)
        ]
        x = torch.nn.functional.gelu(body.projector.fc1(torch.cat(features, -1)))
        patches.append(body.projector.fc3(torch.nn.functional.gelu(body.projector.fc2(x)))[0])
    words = body.embed_tokens(torch.tensor([*PROMPT, PROMPT_END, 2]))
    rows = [words[:1], *patches, state[None], words[1:-1], torch.zeros(NUM, HIDDEN), words[-1:]]
    sequence = torch.cat(rows)[None]
    length = sequence.shape[1]
    x, positions = sequence, torch.arange(length)[None]
    rotary = body.rotary_emb(x, positions)
    everything = torch.zeros(1, 1, length, length)
    for layer in body.layers:
        x = layer(x, attention_mask=everything, position_ids=positions, position_embeddings=rotary)
    first = length - 1 - NUM - 1  # the position before the first placeholder
    return body.norm(x)[0, first : first + NUM]


@torch.no_grad()
def test_a_chunk_is_decoded_as_the_description_says(tmp_path: Path) -> None:
    model, tokens, parts = loaded(tmp_path / "oft")
    assert (tokens.chunk, tokens.size, tokens.num_tokens) == (CHUNK, SIZE, NUM)
    assert tokens.reads.per_observation == 2 * (SIDE // 14) ** 2 + 1
    wanted = simulator_actions(regressed(parts, hidden_states(model, parts)))
    [done] = serve(
        NativeEngine(model.model, config=NativeConfig(max_running=4, max_tokens=2048)), [asked(tokens)]
    ).values()
    np.testing.assert_allclose(tokens.decode(done.token_ids), wanted, atol=1e-4)


@pytest.mark.parametrize("head", [True, False])
def test_training_recomputes_the_log_probs_of_the_rollout(tmp_path: Path, head: bool) -> None:
    model, tokens, _ = loaded(tmp_path / "oft", head=head)
    requests = [asked(tokens, index, temperature=1.0) for index in range(3)]
    done = serve(NativeEngine(model.model, config=NativeConfig(max_running=4, max_tokens=2048)), requests)
    samples = [sample_of(done[one.owner.index], []) for one in requests]
    fresh = load_model(ModelConfig(path=str(tmp_path / "oft"))).model
    train = TrainEngine(fresh, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig())
    for sample, found in zip(samples, train.logprobs(samples), strict=True):
        mask = sample.loss_mask
        np.testing.assert_allclose(found[mask], sample.logprobs[mask], atol=1e-5)
    train.accumulate([replace(one, advantages=np.ones(one.num_tokens, np.float32)) for one in samples])
    train.optimizer_step()
    assert not fresh.get_input_embeddings().weight[fresh.config.zero_token_id].any(), "a placeholder stays empty"


def test_a_checkpoint_of_a_run_loads_again(tmp_path: Path) -> None:
    model, tokens, _ = loaded(tmp_path / "oft")
    save_model(model.model, tmp_path / "saved", model.tokenizer)
    again = load_model(ModelConfig(path=str(tmp_path / "saved")))
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    found = action_tokens(again.model.config)
    assert found is not None and found.query_ids == tokens.query_ids and found.reads.shapes == tokens.reads.shapes
    assert found.reads.shapes["state"] == (PROPRIO,)


def test_a_configuration_without_a_folder_reads_no_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvla_oft_folder(tmp_path / "oft")
    given = json.loads((tmp_path / "oft" / "config.json").read_text()) | {"norm_stats": {DATA_SET: {"action": ACTION}}}
    monkeypatch.chdir(tmp_path / "oft")
    config = OpenVLAConfig.from_dict(dict(given))
    assert not config.parallel_decoding and config.state_size == 0 and config.image_means is None
    assert config.norm_stats == given["norm_stats"]
    own = OpenVLAConfig.from_dict({**given, "parallel_decoding": True, "image_means": MEANS, "image_stds": STDS})
    assert not OpenVLAForCausalLM(own)._keys_to_ignore_on_load_missing


def test_parts_without_support_are_named(tmp_path: Path) -> None:
    openvla_oft_folder(tmp_path / "oft")
    torch.save({}, tmp_path / "oft" / "noisy_action_projector--150000_checkpoint.pt")
    with pytest.raises(UserError, match=r"noisy_action_projector--150000_checkpoint.pt, .* a diffusion action head"):
        load_model(ModelConfig(path=str(tmp_path / "oft")))


def test_statistics_of_the_state_must_be_in_the_folder(tmp_path: Path) -> None:
    openvla_oft_folder(tmp_path / "oft")
    file = tmp_path / "oft" / "dataset_statistics.json"
    found = json.loads(file.read_text())
    del found["libero_spatial_no_noops"]["proprio"]
    file.write_text(json.dumps(found))
    model = load_model(ModelConfig(path=str(tmp_path / "oft"))).model
    with pytest.raises(UserError, match=r"reads a state, .* no proprio q01 .* Copy dataset_statistics.json"):
        action_tokens(model.config)


def test_aloha_is_scaled_by_minimum_and_maximum_and_has_a_third_camera(tmp_path: Path) -> None:
    openvla_oft_folder(tmp_path / "oft")
    file = tmp_path / "oft" / "dataset_statistics.json"
    found = json.loads(file.read_text())[DATA_SET]
    actions = found["action"] | {"min": [-3.0] * SIZE, "max": [2.0] * SIZE, "mask": [True] * SIZE}
    states = found["proprio"] | {"min": [-4.0] * PROPRIO, "max": [1.0] * PROPRIO}
    file.write_text(json.dumps({"aloha1_fold_shirt": {"action": actions, "proprio": states}}))
    config = json.loads((tmp_path / "oft" / "config.json").read_text())
    settings: dict[str, object] = {"unnorm_key": "aloha1_fold_shirt", "num_actions_chunk": CHUNK}
    (tmp_path / "oft" / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(UserError, match="reads 3 cameras, and image and wrist_image are supported"):
        action_tokens(load_model(ModelConfig(path=str(tmp_path / "oft"))).model.config)
    settings["num_images"] = 2
    (tmp_path / "oft" / "config.json").write_text(json.dumps({**config, **settings}))
    tokens = action_tokens(load_model(ModelConfig(path=str(tmp_path / "oft"))).model.config)
    assert tokens is not None and tokens.reads.state is not None
    assert tokens.low.tolist() == [-3.0] * SIZE and tokens.high.tolist() == [2.0] * SIZE
    assert tokens.reads.state.low.tolist() == [-4.0] * PROPRIO and tokens.reads.state.high.tolist() == [1.0] * PROPRIO


def test_numbers_of_a_state_are_clipped_whether_they_are_scaled_or_not() -> None:
    low, high, mask = np.array([0, 0, -1], np.float32), np.array([4, 4, 1], np.float32), np.array([True, True, False])
    found = StateScaling(low=low, high=high, scaled=mask).apply(np.array([1, 9, -3], np.float32))
    # normalize_proprio of openvla-oft: np.clip(np.where(mask, 2 (p - low) / (high - low + 1e-8) - 1, p), -1, 1)
    np.testing.assert_allclose(found, [-0.5, 1, -1], atol=1e-6)


def test_the_published_recipe_asks_for_each_task_as_openvla_does(tmp_path: Path) -> None:
    openvla_oft_folder(tmp_path / "model", head=False)
    recipe = load_recipe(str(ROOT / "examples/published/openvla-oft-libero.yaml"), [f"model.path={tmp_path / 'model'}"])
    config = recipe.episode
    assert isinstance(config, RobotConfig) and recipe.task.starts is not None
    prompts, tokenizer = recipe_prompts(recipe), load_model(ModelConfig(path=str(tmp_path / "model"))).tokenizer
    assert len(recipe.task.starts.instructions) == len(find_family("libero", config.env.settings)[1].tasks)
    for prompt, instruction in zip(prompts.train, recipe.task.starts.instructions, strict=False):
        assert prompt.text == f"In: What action should the robot take to {instruction}?\nOut:"
        assert instruction.startswith("pick up the black bowl")
        assert tokenizer(prompt.text)["input_ids"] == prompt.token_ids.tolist()
    assert [prompt.metadata["task"] for prompt in prompts.train[:10]] == list(range(10))
    states = {(prompt.metadata["task"], int(str(prompt.metadata["init_state"])) % 50) for prompt in prompts.heldout}
    assert len(states) == 500, "each of LIBERO's fixed initial states once"
    actions = action_tokens(load_model(ModelConfig(path=str(tmp_path / "model"))).model.config)
    side = config.env.settings["image_size"]
    pictures = {name: ArraySpec(shape=(side, side, 3), dtype="uint8") for name in ("image", "wrist_image")}
    spec = EnvSpec(
        observation={"state": ArraySpec(shape=(PROPRIO,), dtype="float32"), **pictures},
        action=ActionSpec(low=-np.ones(7, np.float32), high=np.ones(7, np.float32)),
        tasks=("libero_spatial/0",), instructions=("",), horizon=512,
    )  # fmt: skip
    check_spaces(config, spec, policy_actions(actions))
