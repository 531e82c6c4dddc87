"""Decoding with CUDA graphs: one captured forward pass per batch size and context length, replayed at every step.

The host takes longer to launch the kernels of a transformers model than the GPU takes to run them, so Python limits a
decode step. A CUDA graph launches all kernels at once. Its shapes are fixed: batches are padded to a power of two,
contexts to a power of two times 64 keys. Most kernels are small, so the model is compiled as well: torch.compile
joins the operations between two matrix products.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from interlace.engines.rollout.attention import TorchAttention
from interlace.engines.rollout.kv_store import Int64Array, KVStore
from interlace.engines.rollout.live_weights import replaceable_part
from interlace.engines.rollout.runner import Logits, ModelRunner, StepTokens

MIN_ROWS, MIN_KEYS = 4, 64
Replay: TypeAlias = Callable[[], object]
Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Captures a function without arguments. Returns a function that replays it, and the tensor that a replay fills."""


class Inputs(NamedTuple):
    """Buffers that a captured pass reads. B rows, padding included; P pages of each row."""

    token_ids: Tensor
    """[B] token ids."""
    positions: Tensor
    """[B] position of each token; its row contains the keys of all earlier ones."""
    pages: Tensor
    """[B, P] pool cell of each page's first token."""


class Captured(NamedTuple):
    """A captured pass."""

    inputs: Inputs
    replay: Replay
    logits: Tensor
    """[B, vocabulary]; the next replay overwrites it."""


class Binding(NamedTuple):
    """Captured passes, which read the weights and the KV cache at the addresses of their capture."""

    addresses: tuple[int, ...]
    passes: dict[tuple[int, int], Captured]
    """By rows and keys."""
    capture: Capture
    """Captures of one binding share memory. torch refuses a memory pool whose graphs were all dropped."""


class GraphRunner:
    """Runner that replays captured passes if each row runs one token, and calls `inner` otherwise."""

    def __init__(
        self,
        inner: ModelRunner,
        backend: TorchAttention,
        store: KVStore,
        *,
        spare_row: int,
        make_capture: Callable[[], Capture],
        compiles: bool = False,
    ) -> None:
        """make_capture: called whenever the weights or the keys have moved.

        compiles: whether captured passes run the compiled model; one that does not compile runs as it is.
        """
        self._inner, self._backend, self._store = inner, backend, store
        self._spare_row, self._make_capture = spare_row, make_capture
        self._compiled = torch.compile(inner.model.forward, dynamic=True) if compiles else None
        self.dtype = inner.dtype
        self.binding: object = Binding(self._find_addresses(), {}, make_capture())
        self._failed = False

    @property
    def name(self) -> str:
        if self._failed:
            return self._inner.name
        return f"{self._inner.name}, {'compiled, ' if self._compiled else ''}CUDA graphs"

    @property
    def invariance(self) -> str:
        return self._inner.invariance

    def start(self, step: StepTokens) -> Logits:
        token_ids, rows, positions, wanted, given = step
        is_decode = given is None and len(wanted) == len(rows) and not (rows[1:] == rows[:-1]).any()
        captured = self._find_captured(rows, positions) if is_decode and not self._failed else None
        if captured is None:
            return self._inner.start(step)
        num_rows, num_pages = captured.inputs.pages.shape
        padding = num_rows - len(rows)
        padded_rows = np.pad(rows, (0, padding), constant_values=self._spare_row)
        self._fill_buffer(captured.inputs.token_ids, np.pad(token_ids, (0, padding)))
        self._fill_buffer(captured.inputs.positions, np.pad(positions, (0, padding)))
        self._fill_buffer(captured.inputs.pages, self._store.page_table[padded_rows, :num_pages])
        captured.replay()
        return lambda: captured.logits

    def rebind(self) -> None:
        """Drops the captured passes if the weights or the KV pool have moved.

        While the pool is away, nothing is dropped: rebind() is called again after its return.
        """
        self._inner.rebind()
        assert isinstance(self.binding, Binding)
        addresses = self._find_addresses()
        if self._backend.pool.keys and addresses != self.binding.addresses:
            self.binding = Binding(addresses, {}, self._make_capture())

    def _find_addresses(self) -> tuple[int, ...]:
        model, pool = self._inner.model, self._backend.pool
        tensors = (*model.parameters(), *model.buffers(), *pool.keys, *pool.values)
        return tuple(replaceable_part(tensor).data_ptr() for tensor in tensors)

    @staticmethod
    def _fill_buffer(buffer: Tensor, values: Int64Array) -> None:
        buffer.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def _find_captured(self, rows: Int64Array, positions: Int64Array) -> Captured | None:
        """Returns the fitting pass, captured on first use; None if the model cannot be captured."""
        assert isinstance(self.binding, Binding)
        passes = self.binding.passes
        shape = (round_up(len(rows), MIN_ROWS), round_up(int(positions.max()) + 1, MIN_KEYS))
        if shape not in passes:
            captured = self._try_capture(shape, self.binding.capture)
            if captured is None:
                self._failed = True
                return None
            passes[shape] = captured
        return passes[shape]

    def _try_capture(self, shape: tuple[int, int], capture: Capture) -> Captured | None:
        """Captures a pass. Returns None if the model cannot be captured, with and without compilation."""
        try:
            return self._capture_pass(*shape, capture)
        except RuntimeError as error:  # no C compiler, or an operation, such as the routing of experts, waits
            form = "CUDA graphs" if self._compiled is None else "the compilation of CUDA graphs"
            warnings.warn(f"{form} failed; decoding continues without: {error}", stacklevel=2)
            if self._compiled is None:
                return None
            self._compiled = None
            return self._try_capture(shape, capture)

    def _capture_pass(self, num_rows: int, num_keys: int, capture: Capture) -> Captured:
        device = self._inner.model.device
        num_pages = min(-(-num_keys >> self._store.page_shift), self._store.page_table.shape[1])
        inputs = Inputs(
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            pages=torch.zeros(num_rows, num_pages, dtype=torch.int64, device=device),
        )
        self._fill_buffer(inputs.pages, np.repeat(self._store.page_table[[self._spare_row], :num_pages], num_rows, 0))
        replay, logits = capture(lambda: self._run_model(inputs, num_keys))
        return Captured(inputs, replay, logits)

    def _run_model(self, inputs: Inputs, num_keys: int) -> Tensor:
        """Runs the model on the buffers, without any value from the host. Returns [B, vocabulary]."""
        shift, positions = self._store.page_shift, inputs.positions[:, None]
        offset_mask = (1 << shift) - 1
        every_key = torch.arange(num_keys, device=positions.device)[None]
        keys_BK = torch.minimum(every_key, positions)
        cells_BK = inputs.pages.gather(1, keys_BK >> shift) + (keys_BK & offset_mask)
        write_B = inputs.pages.gather(1, positions >> shift)[:, 0] + (inputs.positions & offset_mask)
        tokens_B1 = torch.arange(len(inputs.positions), device=positions.device)[:, None]
        distance_B1K = (positions - every_key)[:, None]
        self._backend.begin_on_device(write_B, tokens_B1, cells_BK, distance_B1K)
        return self._inner.forward(inputs.token_ids, inputs.positions, self._compiled)


def round_up(number: int, least: int) -> int:
    """Returns the smallest power of two times `least` that is at least `number`. least: a power of two."""
    return max(least, 1 << (number - 1).bit_length())


class CudaCapture:
    """Captures CUDA graphs that share one memory pool: only the result of the last replay is read."""

    def __init__(self, device: torch.device) -> None:
        """device: on which the captured functions run."""
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Captures a function, after two calls on a side stream during which libraries allocate their workspaces.

        Raises RuntimeError if the function waits for the GPU.
        """
        with torch.cuda.device(self._device):  # a thread's own device is the first GPU
            return self._capture_function(function)

    def _capture_function(self, function: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other ranks may be threads of this process, which allocate memory meanwhile. torch's own stream of captures
        # belongs to the GPU of the first capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            filled = function()
        return graph.replay, filled
