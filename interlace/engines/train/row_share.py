"""A row of tokens shared by several ranks (DeepSpeed Ulysses, arXiv 2309.14509).

Each rank runs its part of the row through every layer. Around attention the ranks exchange tensors: each rank gives all
heads of its part of the tokens and gets all tokens for its part of the heads, attends to whole sequences as a single
rank does, and sends the result back. Log-probs are then combined, so that each rank computes the loss of the whole row.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from interlace.models.collectives import add_up, exchange_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShare:
    """One rank's part of a row."""

    mesh: DeviceMesh
    """Ranks that share the row."""
    sizes: tuple[int, ...]
    """Tokens of each rank's part."""
    own_T: Tensor
    """[t] indices of the response tokens, out of T, that this rank's part predicts."""

    def to_heads(self, rows: Tensor) -> Tensor:
        """Exchanges [own tokens, heads, D] for [tokens, own heads, D]."""
        sent = rows.unflatten(1, (self.mesh.size(), -1)).movedim(1, 0).flatten(0, 1)
        return exchange_rows(sent, self._even, self.sizes, self.mesh)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Exchanges [tokens, own heads, D] for [own tokens, heads, D]."""
        found = exchange_rows(rows, self.sizes, self._even, self.mesh)
        return found.unflatten(0, (self.mesh.size(), -1)).movedim(0, 1).flatten(1, 2)

    @property
    def _even(self) -> list[int]:
        """Returns this rank's tokens, once for each rank."""
        return [self.sizes[self.mesh.get_local_rank()]] * self.mesh.size()

    def own_heads(self, per_head: Tensor) -> Tensor:
        """Returns this rank's part of [heads]."""
        return per_head.chunk(self.mesh.size())[self.mesh.get_local_rank()]

    def on_all(self, own: Tensor, num_tokens: int) -> Tensor:
        """Combines [t] of every rank into [T] on all ranks; the gradient of a rank's tokens is sent back to it."""
        return add_up(own.new_zeros(num_tokens).index_copy(0, self.own_T, own), self.mesh)
