"""State that leaves its device does so completely, and returns unchanged."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from interlace.models.residence import Move, Residence


def test_nothing_moves_on_a_cpu_whose_memory_is_the_host_s() -> None:
    moved: list[str] = []
    residence = Residence(torch.device("cpu"), {"weights": lambda _move: moved.append("moved")})
    residence.offload()
    residence.onload()
    assert not moved and not residence.is_away("weights")


def test_parts_move_once_each_way_and_come_back_in_the_reverse_of_the_order_in_which_they_left() -> None:
    moved: list[str] = []

    def mover(part: str) -> Callable[[Move], None]:
        return lambda move: moved.append(f"{part} to {move(torch.zeros(1)).device.type}")

    residence = Residence(torch.device("meta"), {part: mover(part) for part in ("moments", "weights")})
    residence.onload()
    residence.offload(["moments"])
    residence.offload(["weights", "moments"])
    residence.offload()
    assert moved == ["moments to cpu", "weights to cpu"] and residence.is_away("moments")
    residence.onload(["moments", "weights"])
    residence.onload()
    assert moved[2:] == ["weights to meta", "moments to meta"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_free_meanwhile() -> None:
    before = torch.cuda.memory_allocated()
    model = nn.Linear(512, 512, device="cuda")
    weight = model.weight.detach().cpu()
    residence = Residence(torch.device("cuda"), {"weights": lambda move: model._apply(move) and None})
    residence.offload()
    assert torch.cuda.memory_allocated() == before
    residence.onload()
    assert model.weight.is_cuda and torch.equal(model.weight.detach().cpu(), weight)
