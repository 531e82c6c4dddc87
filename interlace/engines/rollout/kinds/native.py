"""`native`: the engine of this package."""

from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.engines.rollout.config import NativeConfig
from interlace.engines.rollout.kinds import EngineKind, EngineSite

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from interlace.engines.rollout.protocol import RolloutEngine
    from interlace.models.loading import LoadedModel


class NativeKind(EngineKind):
    """Serves any causal language model of transformers, in this process."""

    Config = NativeConfig
    config: NativeConfig
    takes_adapters = True
    remark = "serves any causal language model of transformers"

    def num_devices(self, pool: str) -> int | None:
        return None if pool == "cpu" and self.num_ranks == 1 else self.num_ranks

    @property
    def num_ranks(self) -> int:
        return self.config.tensor_parallel_size

    def check_model(self, model: "PretrainedConfig", pool: str) -> None:
        from interlace.engines.rollout.eight_bits import check_processor

        if self.config.weights != "int8":
            return
        if pool != "cpu" or self.num_ranks > 1 or not self.config.compile_decoder:
            raise UserError(
                f"rollout.weights=int8 is for the C++ decoder, which serves {model.model_type} whole on CPU cores: "
                "set rollout.weights=model, or place rollout on CPU cores with rollout.tensor_parallel_size=1."
            )
        check_processor()

    def longest_in(self, max_tokens: int) -> int:
        from interlace.engines.rollout.kv_store import STORES

        return STORES[self.config.kv].longest_in(max_tokens)

    def create(self, loaded: "LoadedModel", site: EngineSite) -> "RolloutEngine":
        from interlace.engines.rollout.engine import NativeEngine

        return NativeEngine(
            loaded.model.to(site.devices[0]),  # type: ignore[arg-type]  # transformers' own stub
            config=self.config,
            tokenizer=loaded.tokenizer,
            seed=site.seed,
            num_threads=site.num_threads,
            mesh=site.mesh,
        )
