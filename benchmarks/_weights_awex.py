"""The planner of awex on the same shards as interlace's. It is pure Python, but its package has other requirements."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from interlace.weights.plan import Side

ABSENT = ("megatron", "sglang", "mbridge", "aiohttp", "vllm")
"""Packages that it imports but its planner does not use."""


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        stub: Any = MagicMock(name=spec.name)
        stub.__path__, stub.__spec__ = [], spec
        return stub

    def exec_module(self, module: ModuleType) -> None:
        del module


def awex_planner(folder: Path | None, writers: Side, readers: Side) -> Callable[[], Sequence[object]] | None:
    """Returns a call that plans with awex; None if it is not installed. folder: directory of an unpacked wheel."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, _Stubs())
    try:
        from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta
        from awex.transfer.transfer_plan import TransferPlanBuilder
    except ImportError:
        return None
    import torch
    from awex.transfer import transfer_plan

    transfer_plan.logger = MagicMock()  # it logs every call

    def described(side: Side) -> list[Any]:
        shards: dict[str, list[Any]] = {}
        shapes = {}
        for rank, own in enumerate(side):
            for name, shape, _, box in own:
                shapes[name] = shape
                shards.setdefault(name, []).append(
                    ParameterShardMeta(
                        tp_rank=rank, attn_tp_rank=rank, pp_rank=0, ep_rank=0, ep_tp_rank=0, global_rank=rank,
                        world_size=len(side), engine_rank=0, name=name, shape=box.size,
                        numel=box.size[0] * box.size[1], dtype=torch.bfloat16, global_offset=box.start,
                        num_shards=len(side),
                    )
                )  # fmt: skip
        return [
            ParameterMeta(
                name=name, global_numel=shapes[name][0] * shapes[name][1], global_shape=shapes[name],
                dtype=torch.bfloat16, shards=own, replicas=[ParameterReplicaMeta(shards=own)],
            )
            for name, own in shards.items()
        ]  # fmt: skip

    builder = TransferPlanBuilder(infer_world_size=len(readers), train_world_size=len(writers))
    given = described(readers), described(writers)
    return lambda: builder.build_weights_mapping_operations(*given)
