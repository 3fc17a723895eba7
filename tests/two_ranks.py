"""Run functions on two ranks: in two processes of a gloo process group, like a run on CPUs."""

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
    """Call ``function`` with the rank, 0 or 1, in each of two processes. Returns both results; they may consist of
    tensors and builtins.

    The processes are forked from a server process, which does the slow imports only once for all tests.
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
    """Find a free port for the rendezvous of ranks. The port is below those that the system gives to outgoing
    connections, so that it is not taken before the ranks use it."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are taken")
