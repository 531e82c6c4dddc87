"""`native`: the engine of this package."""

from typing import TYPE_CHECKING

from interlace.engines.rollout.config import NativeConfig
from interlace.engines.rollout.kinds import EngineKind, EngineSite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    def draws_known_ids(self) -> bool:
        return True

    @property
    def num_ranks(self) -> int:
        return self.config.tensor_parallel_size

    def check_model(self, model: "PreTrainedModel", pool: str) -> None:
        if self.config.weights != "int8":
            return
        import torch

        from interlace.engines.cpu.decoder import is_llama_shaped
        from interlace.engines.cpu.int8 import check_processor, refuse_eight_bits

        is_compiled = self.config.compile_decoder and self.config.compile_kernels
        is_whole = pool == "cpu" and self.num_ranks == 1
        if not (is_whole and is_compiled and model.dtype == torch.float32 and is_llama_shaped(model)):
            refuse_eight_bits(model)
        check_processor()

    def longest_in(self, max_tokens: int) -> int:
        from interlace.engines.rollout.kv_store import STORES

        return STORES[self.config.kv].longest_in(max_tokens)

    def create(self, loaded: "LoadedModel", site: EngineSite) -> "RolloutEngine":
        from interlace.engines.rollout.engine import NativeEngine
        from interlace.models.residence import make_current

        make_current(site.devices[0])
        return NativeEngine(
            loaded.model.to(site.devices[0]),  # type: ignore[arg-type]  # transformers' own stub
            config=self.config,
            tokenizer=loaded.tokenizer,
            seed=site.seed,
            num_threads=site.num_threads,
            mesh=site.mesh,
            kv_needs=site.kv_needs,
        )
