"""`sglang`: SGLang, in processes of its own. Not run here: its kernels are for GPUs."""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from interlace.engines.rollout.config import SGLangConfig
from interlace.engines.rollout.kinds import EngineSite, Feature
from interlace.engines.rollout.kinds.base import ServedKind, saved_model

if TYPE_CHECKING:
    from interlace.engines.rollout.protocol import RolloutEngine
    from interlace.models.loading import LoadedModel

INSTALL = "On GPUs: pip install 'interlace[sglang]'. On CPU cores take rollout.engine=native, or vllm."


class SGLangKind(ServedKind):
    """Serves what SGLang serves."""

    Config = SGLangConfig
    config: SGLangConfig
    lacks: ClassVar[Mapping[Feature, str]] = {
        **ServedKind.lacks,
        "truncation": "its log-probs are from before top_p, top_k and min_p",
        "invariance": "its noise depends on where a request was resumed",
    }
    remark = "SGLang on GPUs: not run here, written against its source"

    def absence(self, pool: str) -> str | None:
        if pool != "cuda":
            return f"SGLang's kernels are for GPUs, and the run's devices are CPU cores. {INSTALL}"
        if importlib.util.find_spec("sglang") is None:
            return f"SGLang is not installed. {INSTALL}"
        return None

    def create(self, loaded: "LoadedModel", site: EngineSite) -> "RolloutEngine":
        from interlace.engines.rollout.sglang import SGLangEngine

        # SGLang counts this one among the ends of models that have it.
        tool_call_end = loaded.tokenizer.get_added_vocab().get("<|eom_id|>")
        own_stops = {*loaded.stop_token_ids, *([] if tool_call_end is None else [tool_call_end])}
        with saved_model(loaded) as folder:
            return SGLangEngine(
                folder, self.config, dtype=site.model.dtype, seed=site.seed, own_stops=sorted(own_stops)
            )
