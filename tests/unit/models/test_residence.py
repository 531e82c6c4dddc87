"""State that leaves its device takes all of itself along, and comes back as it was."""

import pytest
import torch
from torch import nn

from interlace.models.residence import Residence


def test_nothing_moves_on_a_cpu_whose_memory_is_the_host_s() -> None:
    moved: list[str] = []
    residence = Residence(torch.device("cpu"), lambda _move: moved.append("moved"))
    residence.offload()
    residence.onload()
    assert not moved and not residence.is_away


def test_it_moves_once_each_way() -> None:
    places: list[torch.device] = []
    residence = Residence(torch.device("meta"), lambda move: places.append(move(torch.zeros(1)).device))
    for change in (residence.onload, residence.offload, residence.offload, residence.onload, residence.onload):
        change()
    assert [place.type for place in places] == ["cpu", "meta"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_free_meanwhile() -> None:
    before = torch.cuda.memory_allocated()
    model = nn.Linear(512, 512, device="cuda")
    weight = model.weight.detach().cpu()
    residence = Residence(torch.device("cuda"), lambda move: model._apply(move) and None)
    residence.offload()
    assert torch.cuda.memory_allocated() == before
    residence.onload()
    assert model.weight.is_cuda and torch.equal(model.weight.detach().cpu(), weight)
