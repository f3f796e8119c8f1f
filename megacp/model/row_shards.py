"""Which rows of a weight a rank keeps when `fully_shard` cuts it along dimension 0, as `torch.chunk` does.

    >>> [chunk_bounds(7, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    >>> [chunk_bounds(2, 4, rank) for rank in range(4)]
    [(0, 1), (1, 2), (2, 2), (2, 2)]
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def owned_rows(parameter: Tensor) -> tuple[int, int]:
    """Rows of the whole weight that this rank keeps, `(start, stop)`; all of them when it is not sharded."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    (placement,) = parameter.placements
    if placement != Shard(0):
        raise ValueError(f"weights are sharded along dimension 0 here, not as {placement}")
    return chunk_bounds(parameter.shape[0], parameter.device_mesh.size(), parameter.device_mesh.get_local_rank())


def chunk_bounds(rows: int, chunks: int, index: int) -> tuple[int, int]:
    size = -(-rows // chunks)
    return min(index * size, rows), min((index + 1) * size, rows)
