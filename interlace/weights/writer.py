"""A trainer rank's end: each version is written down by a codec and made ready to be fetched by a transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from interlace.weights.codecs.base import codec_named
from interlace.weights.config import BY_PLACE, WeightsConfig
from interlace.weights.ref import AdapterBase, Route, WeightPart
from interlace.weights.shards import local_part, shards_of
from interlace.weights.transports.base import transport_named

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from interlace.weights.saved import SavedForm

WITHIN_PROCESS = Route(transport="alias", config=WeightsConfig())


class WeightWriter:
    """One rank's writer. The ranks of a trainer write side by side, each its own blocks; none gathers anything."""

    def __init__(
        self,
        route: Route = WITHIN_PROCESS,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        form: Callable[[], SavedForm] | None = None,
    ) -> None:
        """form: maker of how transformers writes the folder of the model whose weights are written."""
        if route.transport == BY_PLACE:
            raise ValueError("a writer needs a transport: the two ends' places decide which (weights/choose.py)")
        self._transport, self._rank, self._form = route.transport, rank, form
        self.sends_adapters = route.config.adapter == "alone"
        """Flag: of a model with an adapter the adapter travels alone."""
        self._sends_deltas = route.config.codec == "delta"
        self._encoder = codec_named(route.config.codec).encoder(route.config)
        self._sender = transport_named(route.transport).sender(route.config, rank=rank, num_ranks=num_ranks)
        self._chain: tuple[WeightPart, ...] = ()
        """The last part that was sent whole, and those after it."""

    def write(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        copy: bool = True,
        stays: bool = False,
        served: torch.dtype | None = None,
        adapter: AdapterBase | None = None,
    ) -> WeightPart:
        """Makes a version ready. tensors: whole, or DTensors, of which the rank's own block counts.

        copy: whether the version must not change afterwards, even where the tensors do. stays: they do not. served: the
        type of the version's floats; None: their own. adapter: what the tensors, which are factors, are added to.
        """
        start_s = time.perf_counter()
        shards = shards_of(tensors, served)
        parcel = self._encoder.encode(version, shards, map(local_part, tensors.values()))
        if adapter is None:
            parcel = replace(parcel, form=self._form)
        sent = self._sender.send(parcel, version, copy=copy and not stays)
        part = WeightPart(
            version=version,
            rank=self._rank,
            shards=shards,
            transport=self._transport,
            codec=parcel.codec,
            source=sent.source,
            checksum=sent.checksum,
            frozen=sent.frozen or copy,
            num_bytes=parcel.num_bytes,
            base=parcel.base,
            is_base=parcel.base is None and self._sends_deltas,
            behind=self._chain if parcel.base is not None else (),
            seconds=time.perf_counter() - start_s,
            adapter=adapter,
        )
        self._remember(part)
        return part

    def _remember(self, part: WeightPart) -> None:
        """Keeps what a reader of this version or of the one before may ask for."""
        before = self._chain[-1].version if self._chain else part.version
        # Without what lies behind: it is in the chain itself, and not once more in each of its parts.
        self._chain = (*(self._chain if part.base is not None else ()), replace(part, behind=()))
        self._sender.keep({before, *(kept.version for kept in self._chain)})

    def close(self) -> None:
        """Ends the transport."""
        self._sender.close()
