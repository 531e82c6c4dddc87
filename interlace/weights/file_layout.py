"""Layout of a safetensors file whose tensors lie at addresses from which an engine can serve."""

import json
import struct
from collections.abc import Mapping
from math import prod

from interlace.weights.plan import ALIGNMENT, ITEM_BYTES

SAVED_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Names of dtypes in a safetensors file."""


def make_layout(saved: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int], int]:
    """Returns a safetensors header, the offset of each tensor in the order of the file, and the size of the file.

    saved: name of the dtype in torch, and shape of each tensor.
    """

    def rank(entry: tuple[str, tuple[str, tuple[int, ...]]]) -> tuple[int, bool, str]:
        """Sorts widest first, like the format's reference writer, so that each tensor is aligned to its element size.

        Among these, tensors after which the place is no multiple of ALIGNMENT come last.
        """
        name, (dtype, shape) = entry
        return -ITEM_BYTES[dtype], prod(shape) * ITEM_BYTES[dtype] % ALIGNMENT > 0, name

    order = sorted(saved.items(), key=rank)
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, place = {}, 0
    for name, (dtype, shape) in order:
        end = place + prod(shape) * ITEM_BYTES[dtype]
        table[name] = {"dtype": SAVED_TYPES[dtype], "shape": [*shape], "data_offsets": [place, end]}
        starts[name], place = place, end
    text = json.dumps(table).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: start + len(header) for name, start in starts.items()}, place + len(header)
