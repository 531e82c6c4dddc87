"""`tiny:vla` as a Hugging Face model."""

import pytest
import torch

from interlace.core.errors import UserError
from interlace.engines.train.critic import critic_model
from interlace.models.action_tokens import action_tokens
from interlace.models.config import ModelConfig, RobotShape
from interlace.models.loading import check_model, empty_model, load_model, load_tokenizer
from interlace.models.size import model_size
from interlace.robots.models.vla import build_tiny_vla

SHAPE = RobotShape(state_size=6, action_size=3, chunk=2, bins=32)


def test_a_saved_policy_loads_by_the_auto_classes(tmp_path):
    built = load_model(ModelConfig(path="tiny:vla", robot=SHAPE))
    built.model.save_pretrained(tmp_path)
    built.tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    check_model(config)
    loaded = load_model(config)
    for (name, ours), (_, theirs) in zip(
        built.model.state_dict().items(), loaded.model.state_dict().items(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert loaded.model.config.query_token_ids == built.model.config.query_token_ids
    words = "put the frobnicator on the shelf"
    assert load_tokenizer(config)(words)["input_ids"] == built.tokenizer(words)["input_ids"]
    assert model_size(empty_model(config)).num_parameters == model_size(built.model).num_parameters


def test_the_head_answers_in_action_tokens_alone():
    built = load_model(ModelConfig(path="tiny:vla", robot=SHAPE))
    assert built.model(torch.tensor([[40, 41]])).logits.shape == (1, 2, 32)
    assert min(built.stop_token_ids) >= 32


@pytest.mark.parametrize("decoding", ["parallel", "tokens"])
def test_the_context_holds_a_long_chunk(decoding):
    shape = RobotShape(state_size=6, action_size=14, chunk=50, decoding=decoding)
    actions = action_tokens(build_tiny_vla(shape, 0)[0].config)
    prompt = list(range(200))
    assert len(actions.context(prompt)) + actions.num_tokens <= shape.max_positions


def test_the_critic_starts_with_the_policys_eyes():
    policy = load_model(ModelConfig(path="tiny:vla", robot=SHAPE)).model
    critic = critic_model(policy)
    inputs = {"state": torch.randn(3, 6)}
    assert torch.equal(policy.base_model.embed_inputs(inputs), critic.base_model.embed_inputs(inputs))


def test_first_actions_favour_no_direction_if_the_output_layer_starts_at_zero():
    shape = SHAPE.model_copy(update={"head": "squashed"})
    usual, unbiased = (
        load_model(ModelConfig(path="tiny:vla", robot=each)).model
        for each in (shape, shape.model_copy(update={"output_initializer_range": 0.0}))
    )
    given = {"input_ids": torch.tensor([[*unbiased.config.query_token_ids]])}
    assert usual(**given).logits.abs().max() > 0.1
    assert not unbiased(**given).logits.any()
    assert all(map(torch.equal, usual.model.state_dict().values(), unbiased.model.state_dict().values()))


def test_a_flow_head_has_no_output_layer_to_initialise():
    with pytest.raises(ValueError, match="output_initializer_range = 0 with head flow"):
        RobotShape(state_size=6, action_size=3, head="flow", output_initializer_range=0.0)


def test_images_are_embedded():
    shape = SHAPE.model_copy(update={"image_size": 64})
    model = load_model(ModelConfig(path="tiny:vla", robot=shape)).model
    inputs = {"state": torch.randn(2, 6), "image": torch.randint(0, 255, (2, 64, 64, 3), dtype=torch.uint8)}
    assert model.base_model.embed_inputs(inputs).shape == (2, 8, 64)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(path="tiny:vla"), "model.robot"),
        (ModelConfig(path="tiny:micro", robot=SHAPE), "tiny:vla"),
    ],
)
def test_sizes_belong_to_the_policy(config, words):
    with pytest.raises(UserError, match=words):
        check_model(config)


def test_a_policy_is_built_while_another_thread_loads_a_model() -> None:
    """transformers replaces torch.linspace meanwhile, for the whole process."""
    from transformers.initialization import meta_device_safe_creation_ops

    with meta_device_safe_creation_ops(), torch.device("meta"):
        model, _ = build_tiny_vla(SHAPE, seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
