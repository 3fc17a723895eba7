"""Two processes in one gloo group, as the ranks of a run on CPUs are."""

from __future__ import annotations

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
    """What the function returns on each of two ranks: tensors and builtins.

    The ranks are forks of one server process that has imported what they need, once for all tests of this process.
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
    """Where ranks may meet, below the ports that the system gives to connections: nothing takes it before they do."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are taken")
