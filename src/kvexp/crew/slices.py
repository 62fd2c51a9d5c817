"""Processes that hold one model together: all do the same, rank 0 decides and writes.

torchrun starts them, and ends all when one has ended. The line to rank 0 tells what it decides, and when one
is stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from kvexp.crew.crew import Crew, First, Member
from kvexp.crew.wire import SILENCE

KEY = "kvexp/line/{}"
PATIENCE = timedelta(hours=2)  # in a forward pass, as transformers has it: others may load weights for long


class Slice(Crew):
    """A process's place: no work is divided, so that it is a crew of one that hears what rank 0 decides."""

    def __init__(self, inner: First | Member) -> None:
        self._inner = inner

    @property
    def processes(self) -> int:
        """How many processes hold the model."""
        return self._inner.world

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self._inner.first

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of rank 0, on every rank."""
        return self._inner.broadcast(value)

    def gather(self, value: Any) -> list[Any]:
        """Return this rank's value, when all are here: the others have the same."""
        self.barrier()
        return [value]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._inner.barrier()

    def done(self) -> None:
        """Go on: a forward pass of rank 0 takes all of them."""


class Slices:
    """What `Launch` is to ranks that divide the work: how the processes of torchrun come together."""

    together = True
    _formed = 0

    def __init__(self, silence: float = SILENCE) -> None:
        """`silence`: seconds without a sign of life after which a process is given up."""
        self.silence = silence

    @contextmanager
    def joined(self) -> Iterator[Slice]:
        """Form the process group, and hand out this process's place; every rank enters."""
        from torch.distributed import PrefixStore, rendezvous

        store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
        key, Slices._formed = KEY.format(Slices._formed), Slices._formed + 1
        host = os.environ["MASTER_ADDR"]
        if rank == 0:
            crew, well = First(world, self.silence), False
            try:
                with crew.watched():
                    store.set(key, json.dumps(crew.hub.address))
                    crew.hub.wait()
                    _form(PrefixStore("kvexp", store), rank, world)
                    yield Slice(crew)
                well = True
            finally:
                crew.close(well)
            return
        port, token = json.loads(store.get(key))
        member = Member(rank, world, self.silence, host, port, token)
        with member.watched():
            _form(PrefixStore("kvexp", store), rank, world)
            yield Slice(member)
            member.leave()


def _form(store: Any, rank: int, world: int) -> None:
    """Form the process group that transformers works in; once in a process."""
    import atexit

    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        store=store,
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
        device_id=device,
    )
    atexit.register(dist.destroy_process_group)
