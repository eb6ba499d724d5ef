"""Rank, world, collectives, and the log of rank 0.

All collectives of this library are in this module, because NCCL takes only tensors of the device: tensors are moved to
`device()` first; pickled values go through torch's collectives for objects, which move them; integers go through a
process group over the network of the hosts, so that no rank waits for its GPU.

Everything works without a process group too, with a world size of 1. Rank and world are read from the environment of
the `deepspeed` launcher or `torchrun`, so that they are known before torch is loaded: only one rank reports a mistake.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from ds_trainer.ranks.failures import OutOfMemoryError, StoppedError, UserError, ran_out

if TYPE_CHECKING:
    import torch

TIMEOUT = 1800
"""Seconds that a rank waits for another, by default."""
SPINS = 10_000
"""Turns of OpenMP's waiting loop, about 20 microseconds."""

T = TypeVar("T")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_LOG = logging.getLogger("ds_trainer")
_LONE: dict[str, str] = {}
"""The variables by which `start` has described a process that no launcher started; `stop` removes them."""


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Return the number of ranks on this host, which DeepSpeed calls LOCAL_SIZE and torchrun LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size())


def is_main() -> bool:
    return rank() == 0


def info(message: str) -> None:
    """Log on rank 0."""
    if is_main():
        _LOG.info(message)


@functools.cache
def info_once(message: str) -> None:
    """Log on rank 0 what no other part of this job has said yet."""
    info(message)


def warn(message: str) -> None:
    """Log a warning on rank 0."""
    if is_main():
        _LOG.warning(message)


@contextlib.contextmanager
def as_warning(what: str) -> Iterator[None]:
    """Turn an error raised inside into a warning: `what`, a colon, and its cause.

    For what must not end a run that has trained: its figures, pages and cards.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever is wrong with them
        cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        warn(f"{what}: {cause}")


def start_logging() -> None:
    """Write this library's log to standard error, without any prefix."""
    if not _LOG.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False


def show_log() -> None:
    """Start the log as a command does, unless the program that imports this library has seen to it."""
    if _LOG.level == logging.NOTSET and not (_LOG.hasHandlers() and _LOG.isEnabledFor(logging.INFO)):
        start_logging()


def start(timeout: int = TIMEOUT) -> None:
    """Join the process group that the launcher describes, through DeepSpeed, and share out the cores.

    A rank waits at most `timeout` seconds for another, now and in every process group that is made later. DeepSpeed
    makes a second group to train on, for which it takes no timeout, so torch's defaults are changed.
    """
    import deepspeed
    import torch
    from torch.distributed import distributed_c10d

    info_once.cache_clear()  # a program may run one job after another
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())  # collectives over objects use the current device
    else:
        share_threads()
        keep_freed_memory()
    if not torch.distributed.is_initialized():
        if "RANK" not in os.environ:  # no launcher started this process, and DeepSpeed would look for MPI
            _LONE.update(
                RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
            )
            os.environ.update(_LONE)
        seconds = timedelta(seconds=timeout)
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(distributed_c10d, name, seconds)
        # a kernel that only inference uses: it takes minutes to compile, and each rank leaves 69 MB in shared memory
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # a notebook's second run has registered it already
            torch.distributed.register_rendezvous_handler("attempt", _meet)
        deepspeed.init_distributed(verbose=False, timeout=seconds, init_method="attempt://")


def _meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Do what `env://` does, in a part of the store that is this attempt's.

    torchrun keeps one store over its restarts, with the addresses and the notices of processes that are dead.
    """
    from torch.distributed import PrefixStore, rendezvous

    for store, rank_in_store, world in rendezvous("env://", **options):
        yield PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank_in_store, world


def stop() -> None:
    """Leave the process group, so that another run of this process can join a new one."""
    import deepspeed
    import torch.distributed as dist

    _host_group.cache_clear()
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()  # after torch's function DeepSpeed would still use the old groups
    for name in _LONE:  # or the next run, or a command that a notebook starts, would take them for a launcher's
        os.environ.pop(name, None)
    _LONE.clear()


def leave(code: int) -> NoReturn:
    """Write out everything and end the process with this exit code, without Python's tear-down.

    During the tear-down, threads of gloo that outlive their process group abort the process in about one run of ten,
    with exit code -6 ("terminate called without an active exception").
    """
    with contextlib.suppress(OSError):  # the reader of the output may be gone
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def share_threads() -> None:
    """Give each local rank its part of the cores, unless OMP_NUM_THREADS is set; DeepSpeed gives all cores to each."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size()))


def limit_spinning() -> None:
    """Limit how long OpenMP's threads spin while they wait; the variable is read when torch is loaded.

    libgomp's default is minutes, as long as there are not more threads than cores: on a machine with another busy
    process, a waiting thread then takes the core of the thread that it waits for, and training falls to a fortieth of
    its speed. `benchmarks/openmp_spinning.py` shows both. A user's own setting stays.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation; do nothing with another C library.

    A training step allocates the same buffers every time. By default, glibc maps each buffer of more than 32 MiB anew
    and the kernel zeroes it page by page, which is half of a step's time on some machines.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_MAX, 0)
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def bound_freed_memory() -> None:
    """Return freed memory to the system once the ranks of this host together hold more than half of its memory.

    Batches of many shapes leave holes into which no later buffer fits: a rank that trained on SQuAD with 2 to 6 GB in
    use grew to 10 GB.
    """
    if resident_memory() * local_world_size() > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
        give_back_freed_memory()


def resident_memory() -> int:
    """Return the bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back_freed_memory() -> None:
    """Return the memory that glibc keeps to the system, before work of other shapes; the next steps are slower."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def device() -> torch.device:
    """Return the device of this rank: the GPU with its local rank's number, or the CPU."""
    import torch

    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def barrier() -> None:
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def on_main(call: Callable[[], T]) -> T:
    """Run `call` on rank 0 and return its value on every rank; if it raises, all ranks raise. The value must pickle."""
    if is_main():
        try:
            value = call()
        except Exception as error:
            broadcast((None, _for_other_ranks(error)))
            raise
        return broadcast((value, None))[0]
    # without the failure of rank 0 the others would wait in the next collective until its timeout
    value, failure = cast("tuple[Any, Exception | None]", broadcast((None, None)))
    if failure is not None:
        raise failure
    return value


def _for_other_ranks(error: Exception) -> Exception:
    """Return an error that pickles, of the same kind where the kind decides about the exit code or the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, str(error.filename))
    if ran_out(error):
        return OutOfMemoryError(str(error))
    if isinstance(error, StoppedError):
        return error
    return UserError(str(error)) if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")


def on_each_host(call: Callable[[], None]) -> None:
    """Run `call` on rank 0, then on the first rank of each other host; a ValueError on any of them is raised on all."""
    on_main(call)
    mistake = None
    if local_rank() == 0 and not is_main():
        try:
            call()
        except ValueError as error:
            mistake = str(error)
    for text in filter(None, broadcast(gather(mistake))):
        raise UserError(text)


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank. It must pickle."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, device=device())
    return box[0]


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in rank order, on rank 0, and an empty list elsewhere. They must pickle."""
    if world_size() == 1:
        return [value]
    import torch.distributed as dist

    boxes: list[Any] | None = [None] * world_size() if is_main() else None
    dist.gather_object(value, boxes, dst=0)
    return boxes or []


def numbers_of_all(values: Sequence[int]) -> list[list[int]]:
    """Return the integers of each rank, equally many, by rank, on every rank. Waits for no accelerator."""
    if world_size() == 1:
        return [list(values)]
    import torch
    import torch.distributed as dist

    box = torch.zeros(world_size(), len(values), dtype=torch.int64)
    box[rank()] = torch.tensor(values)
    dist.all_reduce(box, group=_host_group())  # the sum, in which each row is zero but on one rank
    return box.tolist()


@functools.cache
def _host_group() -> Any:
    """Return a process group over the network of the hosts: the default one, unless that connects the GPUs."""
    import torch.distributed as dist

    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def mean(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over the ranks, on this rank's device."""
    return total(values) / world_size()


def total(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the ranks, on this rank's device; NCCL has no collective for the host's."""
    values = values.to(device(), copy=True)
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(values)
    return values


def free_port() -> int:
    """Return a port that no process of this host listens at now."""
    with socket.socket() as any_socket:
        any_socket.bind(("", 0))
        return int(any_socket.getsockname()[1])
