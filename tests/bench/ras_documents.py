"""Reports of large jobs in the exact layout of NCCL's RAS server: quick to make, and the same each time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

GPUS_PER_NODE = 8
LAUNCHES_PER_POLL = 7
STAGES = 16  # communicators of different pipeline stages launch different numbers

# A member, up to its counts, as NCCL prints it; the counts are those of its communicator.
_MEMBER = """\
        {
          "rank": %d,
          "host": "10.%d.%d.1",
          "pid": %d,
          "cuda_dev": %d,
          "nvml_dev": %d,
          "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false
          },
          "collective_counts": {
            "Broadcast": %d,
            "Reduce": 0,
            "AllGather": %d,
            "ReduceScatter": %d,
            "AllReduce": %d
          }
        }"""
_COMMUNICATOR = """
    {
      "hash": "0x%x",
      "secondary_hash": "0x%x:0x%x",
      "size": %d,
      "ranks_count": %d,
      "missing_ranks_count": 0,
      "ranks": [
%s
      ],
      "missing_ranks": [

      ]
    }"""
_DOCUMENT = """\
{
  "nccl_version": "2.30.7",
  "cuda_runtime_version": 13000,
  "cuda_driver_version": 13000,
  "timestamp": "2026-12-01 04:%02d:%02d",
  "communicators_count": %d,
  "communicators": [%s
  ],
  "ras": {
    "collection_time_sec": 0.001,
    "timeouts_count": 0
  }
}
"""


@dataclass(frozen=True)
class Shape:
    """A job: the world ranks of each of its communicators."""

    name: str
    communicators: Sequence[Sequence[int]]

    @cached_property
    def entries(self) -> int:
        """Rank entries of a report."""
        return sum(map(len, self.communicators))


def groups(ranks: int, communicators: int, size: int) -> Shape:
    """World, and groups of `size` neighbours, all around the job until there are enough."""
    starts = [(index * size) % ranks for index in range(communicators - 1)]
    parts = [range(ranks), *(range(start, start + size) for start in starts)]
    return Shape(f"{ranks} x {communicators} (groups of {size})", parts)


def full(ranks: int, communicators: int) -> Shape:
    """All ranks in each communicator."""
    return Shape(f"{ranks} x {communicators} full", [range(ranks)] * communicators)


def parallel(ranks: int, tensor: int, data: int) -> Shape:
    """World, tensor parallel groups of neighbours, and data parallel groups across them."""
    block = tensor * data
    tensors = [range(start, start + tensor) for start in range(0, ranks, tensor)]
    datas = [
        range(start + lane, start + block, tensor)
        for start in range(0, ranks, block)
        for lane in range(tensor)
    ]
    return Shape(f"{ranks} x (world + TP{tensor} + DP{data})", [range(ranks), *tensors, *datas])


def document(shape: Shape, step: int, *, behind: bool = False) -> bytes:
    """A report with every member present and running.

    Args:
        shape: The job.
        step: How many polls of training lie behind: all counters of all communicators grow with it.
        behind: Whether one member of each communicator launched one AllReduce less.
    """
    parts = [
        _communicator(index, world_ranks, step, len(world_ranks) // 3 if behind else -1)
        for index, world_ranks in enumerate(shape.communicators)
    ]
    return (_DOCUMENT % (step // 60 % 60, step % 60, len(parts), ",".join(parts))).encode()


def _communicator(index: int, world_ranks: Sequence[int], step: int, behind: int) -> str:
    members = ",\n".join(_members(world_ranks, index % STAGES, step, behind))
    hashed, size = 0x9E3779B97F4A0000 + index, len(world_ranks)
    return _COMMUNICATOR % (hashed, 0x2C033BC95D565A02 + index, hashed ^ 0xFFFF, size, size, members)


def _members(world_ranks: Sequence[int], stage: int, step: int, behind: int) -> Iterable[str]:
    launched = 100_000 + stage * 1_000 + step * LAUNCHES_PER_POLL
    for rank, world_rank in enumerate(world_ranks):
        node, device = divmod(world_rank, GPUS_PER_NODE)
        place = (rank, node // 256, node % 256, 20_000 + device, device, device)
        yield _MEMBER % (*place, step, launched, launched, 3 * launched - (rank == behind))
