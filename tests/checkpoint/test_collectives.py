"""Collectives: of one rank without any communication, of several by gloo, in two groups at once."""

from __future__ import annotations

import multiprocessing
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from raytrain_gpt.checkpoint.collectives import Collectives

WORLD_SIZE = 2
WITHIN = timedelta(seconds=60)


def test_one_rank_is_all_ranks() -> None:
    alone = Collectives(rank=0, world_size=1)
    values = torch.tensor([1.0, -2.0])
    assert alone.summed(values).tolist() == alone.largest(values).tolist() == [1.0, -2.0]
    assert alone.any(True, False) == [True, False]
    assert alone.gathered("value") == ["value"]
    assert alone.background is alone


def rank_main(rank: int, directory: str) -> None:
    """What each rank finds; a value that differs ends its process with an error."""
    store = dist.FileStore(f"{directory}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=WITHIN)
    ranks = Collectives(rank, WORLD_SIZE, WITHIN.total_seconds())
    assert ranks.summed(torch.tensor([1, rank])).tolist() == [2, 1]
    assert ranks.largest(torch.tensor([rank, -rank])).tolist() == [1, 0]
    assert ranks.any(rank == 0, rank == 1, False) == [True, True, False]
    assert ranks.gathered({"rank": rank}) == [{"rank": 0}, {"rank": 1}]

    # Rank 1 begins with the background's exchange, rank 0 with the training's: neither waits for ever.
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(ranks.background.gathered(f"file {rank}"))
    )
    if rank == 1:
        thread.start()
    steps = [ranks.any(step == 3) for step in range(5)]
    if rank == 0:
        thread.start()
    thread.join(WITHIN.total_seconds())
    assert steps == [[False], [False], [False], [True], [False]]
    assert found == ["file 0", "file 1"]
    dist.destroy_process_group()


def test_ranks_agree_in_the_foreground_and_in_the_background(tmp_path: Path) -> None:
    # Both are forked from one process that has imported torch: importing it takes two seconds.
    multiprocessing.set_forkserver_preload([__name__])
    arguments = (str(tmp_path),)
    mp.start_processes(rank_main, arguments, nprocs=WORLD_SIZE, start_method="forkserver")
