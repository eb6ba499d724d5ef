"""One rank of a real all-reduce between hosts, for `launch/doctor.py`: `python -m ds_trainer.hosts.rank REQUEST`.

It needs torch, not DeepSpeed: NCCL where there are GPUs, gloo elsewhere, as DeepSpeed picks. One rank a host.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from ds_trainer.hosts.probe import answer, interfaces
from ds_trainer.ranks.failures import UserError

_TO_TELL = 2
"""Seconds of the time limit that are kept for the answer."""


def all_reduce(request: dict[str, Any], until: float) -> dict[str, Any]:
    """Meet the other ranks at `address` and `port`, sum over all; tell backend, own address, interface, seconds.

    No wait goes on beyond `until`, of the monotonic clock.
    """
    import torch
    import torch.distributed as dist

    rank, world = request["rank"], request["world"]
    timeout = timedelta(seconds=max(1.0, until - time.monotonic()))
    store = dist.TCPStore(request["address"], request["port"], world, rank == 0, timeout)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store.set(f"backend{rank}", backend)
    backends = [store.get(f"backend{other}").decode() for other in range(world)]
    if len(set(backends)) > 1:
        raise UserError(f"GPUs on some hosts only: the ranks in order would use {', '.join(backends)}")
    start = time.monotonic()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    value = torch.tensor([rank + 1.0], device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    if value.item() != world * (world + 1) / 2:
        raise UserError(f"the sum over the ranks is {value.item():g}, not {world * (world + 1) / 2:g}")
    seconds = round(time.monotonic() - start, 2)
    address = _own_address(request["port"])
    names = {own: name for name, own in interfaces().items()}
    dist.barrier()  # none leaves, and its sockets go, while another still looks at its own
    return {"backend": backend, "address": address, "interface": names.get(address or ""), "seconds": seconds}


def _own_address(store_port: int) -> str | None:
    """The address at this end of the process's connections, but for those to the store; None if there are none."""
    own = {link.removeprefix("socket:[").removesuffix("]") for link in _open_files()}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):
            continue
        with open(table) as lines:
            rows = [line.split() for line in lines][1:]
        for row in rows:
            ports = {int(end.rpartition(":")[2], 16) for end in row[1:3]}
            if row[9] in own and row[3] == "01" and store_port not in ports:  # 01: established
                return _dotted(row[1].partition(":")[0])
    return None


def _open_files() -> list[str]:
    paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return [os.readlink(path) for path in paths if os.path.lexists(path)]  # the listing's own is gone


def _dotted(digits: str) -> str:
    """The kernel's hexadecimal of an IPv4 address, or of one mapped into IPv6, in this machine's byte order."""
    word = int(digits[-8:], 16)
    return ".".join(str(part) for part in word.to_bytes(4, sys.byteorder))


def main() -> None:
    request = json.loads(base64.b64decode(sys.argv[1]))
    signal.alarm(request["seconds"])  # nothing stays behind where the ssh is gone
    try:
        answer(all_reduce(request, time.monotonic() + request["seconds"] - _TO_TELL))
    except (RuntimeError, ValueError, ImportError, OSError) as error:
        answer({"error": str(error)})
    sys.stdout.flush()
    os._exit(0)  # the backends' threads may wait for a peer that is gone


if __name__ == "__main__":
    main()
