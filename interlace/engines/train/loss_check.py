"""Checks of a loss's result before training uses it: a tensor of the wrong shape would be broadcast silently."""

import torch

from interlace.core.errors import UserError
from interlace.core.training import LossInputs, LossOutputs


def check_outputs(outputs: object, inputs: LossInputs) -> LossOutputs:
    """Returns the outputs. Raises UserError unless they have one number per token and carry a gradient."""
    shape = inputs.logprobs_T.shape
    if not isinstance(outputs, LossOutputs):
        raise UserError(f"the algorithm's loss() returned a {type(outputs).__name__}; it returns LossOutputs.")
    for name, values in {"loss_T": outputs.loss_T, **outputs.metrics_T}.items():
        if not isinstance(values, torch.Tensor) or values.shape != shape:
            found = (
                f"shape {list(values.shape)}" if isinstance(values, torch.Tensor) else f"type {type(values).__name__}"
            )
            raise UserError(
                f"the algorithm's loss() returned {name} of {found} for {shape[0]} tokens. It is one number a token, "
                f"shape [{shape[0]}]: masks, sums and means are the engine's."
            )
    for name, values in outputs.sample_metrics_N.items():
        if not isinstance(values, torch.Tensor) or values.shape != (inputs.num_samples,):
            raise UserError(
                f"the algorithm's loss() returned sample_metrics_N[{name!r}] that is not one number a sample: a tensor "
                f"of shape [{inputs.num_samples}]."
            )
    if not outputs.loss_T.requires_grad:
        raise UserError(
            "the algorithm's loss() returned a loss_T without a gradient: it does not depend on inputs.logprobs_T or "
            "inputs.entropy_T."
        )
    return outputs
