"""A trainer rank's writer: a codec encodes each version, and a transport makes it available to readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

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
    """One rank's writer. A trainer's ranks write their blocks in parallel; no rank gathers other ranks' blocks."""

    def __init__(
        self,
        route: Route = WITHIN_PROCESS,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        form: Callable[[], SavedForm] | None = None,
    ) -> None:
        """form: maker of the saved form of the model whose weights are written."""
        if route.transport == BY_PLACE:
            raise ValueError("a writer needs a transport: the two ends' places decide which (weights/choose.py)")
        self._transport, self._rank, self._form = route.transport, rank, form
        self.sends_adapters = route.config.adapter == "alone"
        """Flag: if the model has an adapter, the adapter is sent alone."""
        self._sends_deltas = route.config.codec == "delta"
        self._encoder = codec_named(route.config.codec).encoder(route.config)
        self._sender = transport_named(route.transport).sender(route.config, rank=rank, num_ranks=num_ranks)
        self._chain: tuple[WeightPart, ...] = ()
        """The last part that was sent whole, and the parts after it."""

    def write(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        copy: bool = True,
        stays: bool = False,
        served: torch.dtype | None = None,
        exact: Container[str] = (),
        adapter: AdapterBase | None = None,
    ) -> WeightPart:
        """Makes a version available. tensors: whole tensors, or DTensors, of which this rank's block is written.

        copy: the version must not change afterwards, even if the tensors do. stays: the tensors never change. served:
        dtype in which floats are served. If None, their dtype is kept. exact: names of tensors whose dtype is kept in
        any case, and that no codec rounds. adapter: base of the tensors, if these are the factors of an adapter.
        """
        start_s = time.perf_counter()
        shards = shards_of(tensors, served, exact)
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
            chain_hash=sent.checksum if parcel.base is None else self._extend_chain(sent.checksum),
            frozen=sent.frozen or copy,
            num_bytes=parcel.num_bytes,
            base=parcel.base,
            is_base=parcel.base is None and self._sends_deltas,
            behind=self._chain if parcel.base is not None else (),
            seconds=time.perf_counter() - start_s,
            adapter=adapter,
        )
        self._keep_parts(part)
        return part

    def _extend_chain(self, checksum: str) -> str:
        """Returns the chain_hash of a delta to the previous version. checksum: of the delta."""
        return xxhash.xxh3_128_hexdigest(f"{self._chain[-1].chain_hash} {checksum}".encode())

    def _keep_parts(self, part: WeightPart) -> None:
        """Keeps the parts that a reader of this version or of the previous one may request."""
        before = self._chain[-1].version if self._chain else part.version
        # With an empty `behind`: the chain itself contains the earlier parts, so its parts must not repeat them.
        self._chain = (*(self._chain if part.base is not None else ()), replace(part, behind=()))
        self._sender.keep({before, *(kept.version for kept in self._chain)})

    def close(self) -> None:
        self._sender.close()
