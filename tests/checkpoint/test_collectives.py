"""Collectives: one rank without communication, and several ranks over gloo in two groups at once."""

from __future__ import annotations

import multiprocessing
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from raytrain_gpt.checkpoint.collectives import MAX_JSON_BYTES, Collectives, DelayedFlags

WORLD_SIZE = 2
WITHIN = timedelta(seconds=60)


def test_one_rank_is_all_ranks() -> None:
    alone = Collectives(rank=0, world_size=1)
    values = torch.tensor([1.0, -2.0])
    assert alone.all_reduce_sum(values).tolist() == [1.0, -2.0]
    assert (
        alone.any_later(True, False)() == DelayedFlags(alone).exchange(True, False) == [True, False]
    )
    assert alone.all_gather_rows(torch.tensor([3, 4])).tolist() == [[3, 4]]
    assert alone.all_gather_json("value", str) == ["value"]
    assert alone.background is alone


def rank_main(rank: int, directory: str) -> None:
    """Run the checks of one rank; a wrong value makes its process fail."""
    store = dist.FileStore(f"{directory}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=WITHIN)
    ranks = Collectives(rank, WORLD_SIZE, *[WITHIN.total_seconds()] * 2)
    assert ranks.all_reduce_sum(torch.tensor([1, rank])).tolist() == [2, 1]
    assert ranks.any_later(rank == 0, rank == 1, False)() == [True, True, False]
    assert ranks.all_gather_rows(torch.tensor([rank, 2**62])).tolist() == [[0, 2**62], [1, 2**62]]
    assert ranks.all_gather_json({"rank": rank}, dict[str, int]) == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(
        ValueError, match="a rank sent 67108867 bytes, more than the maximum of 67108864"
    ):
        ranks.all_gather_json("x" * (MAX_JSON_BYTES + 1) if rank else "", str)
    with pytest.raises(ValueError, match="valid integer"):
        ranks.all_gather_json("no number" if rank else 1, int)

    # Rank 1 starts with the background exchange, rank 0 with the training exchange; neither may deadlock.
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(ranks.background.all_gather_json(f"file {rank}", str))
    )
    if rank == 1:
        thread.start()
    agreement = DelayedFlags(ranks)
    steps = [agreement.exchange(rank == 1 and step in (0, 3, 6)) for step in range(6)]
    agreement.reset()
    steps.append(agreement.exchange(rank == 1))
    if rank == 0:
        thread.start()
    thread.join(WITHIN.total_seconds())
    # The first call and the one after `reset` return their own flags; others, those of the previous call.
    assert [told for (told,) in steps] == [True, True, False, False, True, False, True]
    assert found == ["file 0", "file 1"]
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_agree_in_the_foreground_and_in_the_background(tmp_path: Path) -> None:
    # Both ranks are forked from one process that has imported torch, because the import takes two seconds.
    multiprocessing.set_forkserver_preload([__name__])
    arguments = (str(tmp_path),)
    mp.start_processes(rank_main, arguments, nprocs=WORLD_SIZE, start_method="forkserver")
