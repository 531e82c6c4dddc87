"""Writes what LeRobot's own policies compute, for tests/contract/test_lerobot.py to compare with.

    python tests/oracles/lerobot_fixtures.py FOLDER

Runs in an environment with lerobot 0.6.1 (`make test-lerobot`; Python 3.12 or later), which cannot hold this package.
It writes FOLDER/KIND for smolvla, pi0 and pi05: a tiny random policy as LeRobot saves it, and `computed.npz` with
prepared inputs, noise, and the chunk of the sampler.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

CHUNK, SIZE, STATES, TOKENS, VOCABULARY = 6, 3, 5, 7, 300
TEXT = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "pad_token_id": 2,
}  # fmt: skip
EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
FEATURES = {
    "input_features": {
        "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 48, 64)),
        "observation.state": PolicyFeature(FeatureType.STATE, (STATES,)),
    },
    "output_features": {"action": PolicyFeature(FeatureType.ACTION, (SIZE,))},
}
SIZES = {"chunk_size": CHUNK, "n_action_steps": 2, "max_state_dim": 8, "max_action_dim": 8, "device": "cpu"}


def make_smolvla(folder: Path) -> SmolVLAPolicy:
    """Makes a small SmolVLA. Its language model is a folder with a configuration and a processor: LeRobot would fetch
    them."""
    vlm = folder / "vlm"
    vlm.mkdir(parents=True)
    small = SmolVLMConfig(text_config=TEXT, vision_config={**EYE, "image_size": 64, "patch_size": 16}, scale_factor=2)
    small.save_pretrained(vlm)
    make_processor().save_pretrained(vlm)
    config = SmolVLAConfig(
        **FEATURES, **SIZES, vlm_model_name=str(vlm), load_vlm_weights=False, num_vlm_layers=4, num_steps=4,
        resize_imgs_with_padding=(64, 64),
    )  # fmt: skip
    return SmolVLAPolicy(config)


def make_processor() -> SmolVLMProcessor:
    """Makes a processor whose tokenizer has the special tokens that LeRobot reads."""
    named = {"fake_image_token": "<fake>", "image_token": "<image>", "global_image_token": "<global>"}
    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", extra_special_tokens=named
    )
    return SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor(), chat_template="{{ messages }}")


def make_pi(kind: str):
    """Makes a small pi0 or pi0.5, whose sizes are fixed in LeRobot's module: two names of the module are replaced."""
    module = modeling_pi0 if kind == "pi0" else modeling_pi05
    tiny = {"depth": 4, "mlp_dim": 96, "num_heads": 8, "num_kv_heads": 1, "head_dim": 8}
    module.get_gemma_config = lambda variant: SimpleNamespace(width=48 if "300m" in variant else 64, **tiny)
    original = module.PaliGemmaForConditionalGenerationWithPiGemma

    def smaller(config):
        config._vocab_size = config.text_config.vocab_size = VOCABULARY
        for name, value in {**EYE, "projection_dim": 64, "image_size": 56}.items():
            setattr(config.vision_config, name, value)
        return original(config=config)

    module.PaliGemmaForConditionalGenerationWithPiGemma = smaller
    config = (PI0Config if kind == "pi0" else PI05Config)(
        **FEATURES, **SIZES, image_resolution=(56, 56), num_inference_steps=4
    )
    return (module.PI0Policy if kind == "pi0" else module.PI05Policy)(config)


@torch.no_grad()
def write(kind: str, folder: Path) -> None:
    """Writes one policy and what it computes."""
    torch.manual_seed(0)
    policy = (make_smolvla(folder) if kind == "smolvla" else make_pi(kind)).eval()
    for name, parameter in policy.named_parameters():  # pi0.5's adaptive norms start at 0, and would ignore time
        is_scale = "norm" in name and "dense" not in name and kind == "smolvla"
        parameter.copy_(torch.randn_like(parameter) * 0.15 + float(is_scale))
    policy.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    changed = {"vlm_model_name": "vlm"} if kind == "smolvla" else {"vision_heads": EYE["num_attention_heads"]}
    (folder / "config.json").write_text(json.dumps(settings | changed))
    # The inputs below are already normalised.
    identity = {"steps": [{"registry_name": "normalizer_processor", "config": {"norm_map": {}}}]}
    (folder / "policy_preprocessor.json").write_text(json.dumps(identity))
    side = 64 if kind == "smolvla" else 56
    picture, state = torch.rand(1, 3, side, side) * 2 - 1, torch.randn(1, 8)
    tokens, noise = torch.randint(3, VOCABULARY, (1, TOKENS)), torch.randn(1, CHUNK, 8)
    real = torch.ones(1, TOKENS, dtype=torch.bool)
    given = [[picture], [torch.ones(1, dtype=torch.bool)], tokens, real]
    sampled = policy.model.sample_actions(*given, *([] if kind == "pi05" else [state]), noise=noise)
    computed = {"picture": picture, "state": state, "tokens": tokens, "noise": noise, "chunk": sampled}
    np.savez(folder / "computed.npz", **{name: tensor.numpy() for name, tensor in computed.items()})


if __name__ == "__main__":
    for one in ("smolvla", "pi0", "pi05"):
        write(one, Path(sys.argv[1]) / one)
