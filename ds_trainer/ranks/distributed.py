"""Who and where this process is: rank, world, device, threads, collectives, rank-0 log.

All collectives of this library are here. Those over tensors take them to `device()` first, those over plain values go
by objects, which torch takes there, or through a group of the hosts' own.

Works with no process group too (world size 1). The environment of the `deepspeed` launcher or `torchrun` is read
before torch is loaded, so that mistakes are told by one rank only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ds_trainer.ranks import attempts
from ds_trainer.ranks.failures import OutOfMemoryError, UserError, ran_out

if TYPE_CHECKING:
    import torch

TIMEOUT = 1800
"""Seconds that a rank waits for another, unless a command says otherwise."""

T = TypeVar("T")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_LOG = logging.getLogger("ds_trainer")


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Ranks on this host: DeepSpeed's launcher says LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size())


def is_main() -> bool:
    return rank() == 0


def info(message: str) -> None:
    """Log on rank 0."""
    if is_main():
        _LOG.info(message)


def warn(message: str) -> None:
    """Log a warning on rank 0."""
    if is_main():
        _LOG.warning(message)


def start_logging() -> None:
    """Send this library's log to standard error, plain."""
    if not _LOG.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False


def start(timeout: int = TIMEOUT) -> None:
    """Join the process group that the launcher describes, through DeepSpeed; share out the cores.

    `timeout`, in seconds, is how long a rank waits for another, here and in every process group made later: DeepSpeed
    trains on one of its own, which takes torch's default and no other.
    """
    import deepspeed
    import torch
    from torch.distributed import distributed_c10d

    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())  # collectives over objects go through the current device
    else:
        share_threads()
        keep_freed_memory()
    if not torch.distributed.is_initialized():
        _describe_lone_process()
        seconds = timedelta(seconds=timeout)
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(distributed_c10d, name, seconds)
        attempts.register()
        with building_kernels():
            deepspeed.init_distributed(verbose=False, timeout=seconds, init_method=attempts.INIT_METHOD)


@contextlib.contextmanager
def building_kernels() -> Iterator[None]:
    """While DeepSpeed may compile: remove the locks of processes that were killed at it, for which torch would wait.

    Whoever may compile holds a shared lock on the folder of kernels; where nobody does, a lock of torch's is stale.
    """
    from torch.utils.cpp_extension import _get_build_directory

    with contextlib.ExitStack() as until_built:
        with contextlib.suppress(OSError):
            # torch's own word for where it builds: one lock a folder, the default one or one that the user names
            own = Path(_get_build_directory("ds_trainer", verbose=False))
            held = os.open(own / "users", os.O_RDWR | os.O_CREAT)
            until_built.callback(os.close, held)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for lock in own.parent.glob("*/lock"):
                    lock.unlink(missing_ok=True)
            fcntl.flock(held, fcntl.LOCK_SH)
        yield


def stop() -> None:
    """Leave the process group."""
    import torch.distributed as dist

    _host_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    free_shared_memory()


def free_shared_memory() -> None:
    """Remove what DeepSpeed's CPU kernel would leave in shared memory, 69 MB a rank."""
    place = "_".join(map(str, (os.getuid(), os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), rank())))
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{place}").unlink(missing_ok=True)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, everything written.

    Without Python's own tear-down: threads of gloo that outlive their process group abort it there, after all is done,
    in about one run of ten ("terminate called without an active exception", exit code -6).
    """
    with contextlib.suppress(OSError):  # whoever read it may be gone
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def share_threads() -> None:
    """Give each local rank its part of the cores; DeepSpeed leaves every rank all of them. OMP_NUM_THREADS wins."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size()))


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next allocation; where there is another C library, do nothing.

    A training step allocates the same buffers every time. By default each of more than 32 MiB is mapped, zeroed by the
    kernel a page at a time and unmapped again: half of a step's time on some machines.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def bound_freed_memory() -> None:
    """Give back what is kept once this host's ranks together hold more than half its memory.

    Batches of many shapes leave holes that fit no other's blocks: SQuAD's ranks grew to 10 GB here, of 2 to 6 in use.
    """
    try:
        held = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return
    if held * local_world_size() > os.sysconf("SC_PHYS_PAGES") // 2:
        give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Give the system what glibc keeps free, for work of other shapes; the next steps pay for it once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def device() -> torch.device:
    """The device of this rank: one GPU a local rank, or the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def barrier() -> None:
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def on_main(call: Callable[[], T]) -> T:
    """Run `call` on rank 0 only and give its value, which must pickle, on every rank; if it raises, all ranks raise."""
    if not is_main():
        outcome: tuple[Any, Exception | None] = broadcast((None, None))
    else:
        try:
            outcome = (call(), None)
        except Exception as error:
            broadcast((None, _for_other_ranks(error)))
            raise
        broadcast(outcome)
    value, mistake = outcome
    if mistake is not None:
        raise mistake
    return value


def _for_other_ranks(error: Exception) -> Exception:
    """The error in a form that every rank can read: of the kinds that are told to the user, the same kind."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, str(error.filename))
    if ran_out(error):
        return OutOfMemoryError(str(error))
    return UserError(str(error)) if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")


def on_each_host(call: Callable[[], None]) -> None:
    """Run `call` on rank 0, then on the first rank of every other host; if it raises anywhere, all ranks raise."""
    on_main(call)
    mistake = None
    if local_rank() == 0 and not is_main():
        try:
            call()
        except ValueError as error:
            mistake = str(error)
    mistakes = list(filter(None, broadcast(gather(mistake))))
    if mistakes:
        raise UserError(mistakes[0])


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank. Any value that pickles."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, device=device())
    return box[0]


def gather(value: T) -> list[T]:
    """Every rank's value on rank 0, in rank order; an empty list elsewhere."""
    if world_size() == 1:
        return [value]
    import torch.distributed as dist

    boxes: list[Any] | None = [None] * world_size() if is_main() else None
    dist.gather_object(value, boxes, dst=0)
    return boxes or []


def largest(value: int) -> int:
    """The largest of all ranks' values, on every rank. Waits for no accelerator."""
    if world_size() == 1:
        return value
    import torch
    import torch.distributed as dist

    box = torch.tensor([value])
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=_host_group())
    return int(box)


def numbers_of_all(values: Sequence[int]) -> list[list[int]]:
    """Every rank's whole numbers, equally many, by rank, on every rank. Waits for no accelerator."""
    if world_size() == 1:
        return [list(values)]
    import torch
    import torch.distributed as dist

    box = torch.zeros(world_size(), len(values), dtype=torch.int64)
    box[rank()] = torch.tensor(values)
    dist.all_reduce(box, group=_host_group())
    return box.tolist()


@functools.cache
def _host_group() -> Any:
    """A process group over the hosts' own network: the default one, unless that is the accelerators'."""
    import torch.distributed as dist

    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def mean(values: torch.Tensor) -> torch.Tensor:
    """The average of a tensor over the ranks, on this rank's device."""
    return _all_reduced(values, "SUM") / world_size()


def maximum(values: torch.Tensor) -> torch.Tensor:
    """The largest of the ranks' values, for each of a tensor, on this rank's device."""
    return _all_reduced(values, "MAX")


def _all_reduced(values: torch.Tensor, operation: str) -> torch.Tensor:
    """A copy on this rank's device, reduced over the ranks: NCCL has no collective for what the host holds."""
    values = values.to(device(), copy=True)
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(values, op=getattr(dist.ReduceOp, operation))
    return values


def _describe_lone_process() -> None:
    """A process that no launcher started is a world of one, at a free port: DeepSpeed would look for MPI."""
    if "RANK" in os.environ:
        return
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in alone.items()})
