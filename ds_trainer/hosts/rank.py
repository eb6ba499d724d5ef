"""One rank of an all-reduce between the hosts, for `launch/doctor.py`.

It needs torch but not DeepSpeed, and takes the backend that DeepSpeed takes: NCCL with GPUs, else gloo. Every host has
one rank.
"""

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ds_trainer.ranks.failures import UserError

_TO_ANSWER = 2  # seconds of the time limit that remain for the answer


def all_reduce(request: dict[str, Any], interfaces: Mapping[str, str]) -> dict[str, Any]:
    """Meet the other ranks at `address` and `port`, and sum a number over all ranks within `seconds`.

    `interfaces` are the addresses of this host's interfaces by their names.
    """
    import torch
    import torch.distributed as dist

    start, rank, world = time.monotonic(), request["rank"], request["world"]
    timeout = timedelta(seconds=request["seconds"] - _TO_ANSWER)
    store = dist.TCPStore(request["address"], request["port"], world, rank == 0, timeout)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store.set(f"backend{rank}", backend)
    backends = [store.get(f"backend{other}").decode() for other in range(world)]
    if len(set(backends)) > 1:
        raise UserError(f"only some hosts have GPUs: the ranks in order would use {', '.join(backends)}")
    met = time.monotonic()
    timeout -= timedelta(seconds=min(met - start, request["seconds"] / 2))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    value = torch.tensor([rank + 1.0], device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    if value.item() != world * (world + 1) / 2:
        raise UserError(f"the sum over the ranks is {value.item():g}, not {world * (world + 1) / 2:g}")
    found = f"{backend}{_end_of_connections(request['port'], interfaces)}, {time.monotonic() - met:.2f} s"
    dist.barrier()  # no rank may leave, and close its connections, while another still looks for its own
    return {"found": found}


def _end_of_connections(store_port: int, interfaces: Mapping[str, str]) -> str:
    """Name the address and interface of this process's connections to other ranks; those to the store do not count."""
    import psutil  # type: ignore[import-untyped]

    for link in psutil.net_connections("tcp"):
        ports = {end.port for end in (link.laddr, link.raddr) if end}
        if link.pid == os.getpid() and link.status == psutil.CONN_ESTABLISHED and store_port not in ports:
            address = link.laddr.ip.removeprefix("::ffff:")  # IPv4 within IPv6
            names = {own: name for name, own in interfaces.items()}
            return f", from {address} on {names.get(address)}"
    return ""
