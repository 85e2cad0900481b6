"""Which texts are computed together. Plain Python."""

from collections.abc import Sequence

# Tokens of a batch, with what it is padded by: what a CPU's caches hold, and what keeps a GPU busy.
CPU_BATCH_TOKENS = 1024
GPU_BATCH_TOKENS = 16384


def batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of texts, parted into batches of similar lengths, the longest texts first.

    A batch, padded to its longest text, has at most `budget` tokens, or else a single text.
    """
    found: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not room:
            found.append([])
            room = max(1, budget // max(1, lengths[index]))
        found[-1].append(index)
        room -= 1
    return found
