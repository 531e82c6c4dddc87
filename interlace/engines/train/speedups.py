"""Faster layers through optional libraries: torch.compile and Liger's kernels."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from interlace.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPILERS = ("g++", "clang++")


def compile_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Compiles each decoder layer at its first call, for rows of any length; code that cannot be traced runs eagerly.

    Layers of one kind share their code, so a deep model compiles as fast as a shallow one. Raises UserError if no
    compiler is found.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    check_compiler(device)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layers to compile: set actor.compile=false.")
    for layer in layers:
        layer.compile(dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raises UserError if torch.compile cannot generate code for the device."""
    if device.type == "cpu":
        wanted = (os.environ["CXX"],) if "CXX" in os.environ else COMPILERS
        if not any(map(shutil.which, wanted)):
            raise UserError(
                f"actor.compile=true needs a C++ compiler ({' or '.join(wanted)}), and none is found: install one, or "
                "set actor.compile=false."
            )
    elif find_spec("triton") is None:
        raise UserError("actor.compile=true needs triton, which is not installed: install it, or leave compile off.")


def apply_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Replaces norms and MLPs of the model by Liger's kernels (arXiv 2410.10989).

    Other models of this process, such as the reference and the rollout engine, keep their layers. Liger's kernel of
    rotary positions is not used, because it would replace a function that all models of the architecture call; nor is
    its fused loss, since losses here are computed on selected tokens. Raises UserError if Liger is not installed, on a
    CPU, and for an architecture without kernels.
    """
    check_liger(device)
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(
            f"actor.liger=true: Liger has no kernels for {kind!r} models. It has them for "
            f"{', '.join(MODEL_TYPE_TO_APPLY_LIGER_FN)}."
        )
    # Liger also replaces classes and functions in the modules of the architecture, which other models use.
    classes = {base for layer in model.modules() for base in type(layer).__mro__}
    kept = {name: dict(vars(sys.modules[name])) for name in {each.__module__ for each in classes}}
    try:
        _apply_liger_kernel_to_instance(model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    finally:
        for name, names in kept.items():
            vars(sys.modules[name]).update(names)


def check_liger(device: torch.device) -> None:
    """Raises the errors of apply_liger that do not depend on the model."""
    if device.type == "cpu":
        raise UserError("actor.liger=true: Liger's kernels are for GPUs, and the actor runs on a CPU. Leave it off.")
    if find_spec("liger_kernel") is None:
        raise UserError("actor.liger=true needs Liger, which is not installed: pip install 'interlace[liger]'.")
