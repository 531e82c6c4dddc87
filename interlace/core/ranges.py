"""Text of whole numbers as ranges."""

from collections.abc import Collection


def format_ranges(numbers: Collection[int]) -> str:
    """Writes whole numbers as ranges: 1-5,9."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
