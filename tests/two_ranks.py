"""Run functions in two processes of one gloo group, as the ranks of a run on CPUs are."""

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


def on_two_ranks(function: Callable[[int], Any], folder: Path) -> list[Any]:
    """Call the function on each of two ranks; returns both results, which may consist of tensors and builtins.

    The ranks are forks of one server process, which does the imports only once for all tests of this process.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.imports"])
    multiprocessing.start_processes(_enter, (str(folder), function), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def _enter(rank: int, folder: str, function: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(function(rank), f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """Find a free port at which ranks can meet. It is below the ports that the system gives to outgoing connections, so
    nothing takes it before the ranks do."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are taken")
