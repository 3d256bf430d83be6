"""Read given sequences of a split into one array: every row group that is needed, once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raytrain_gpt.data.order import Ids
from raytrain_gpt.data.shards import Manifest, Split, read_row_group
from raytrain_gpt.data.storage import Place
from raytrain_gpt.data.tokenizer import Tokens


def read_sequences(
    directory: Place, manifest: Manifest, split: Split, seq_len: int, ids: Ids
) -> tuple[Tokens, Ids]:
    """Tokens of sequences, with the id of what was put into each place, kept where it is put there.

    Args:
        directory: The dataset.
        manifest: Its manifest.
        split: `train` or `val`.
        seq_len: Context length; a sequence has one token more, the last target.
        ids: int64 (n,), sequence ids in the wanted order; negative ones stay zero.

    Returns:
        tokens of the manifest's dtype (n, seq_len + 1), delivered ids int64 (n,), −1 where empty.
        Memory: the result and one row group.

    Raises:
        DataError: a row group cannot be read or holds ids outside the vocabulary.
    """
    row_groups = manifest.row_groups(split)
    ends = np.cumsum(manifest.row_group_sequences(split, seq_len))
    tokens: Tokens = np.zeros((len(ids), seq_len + 1), manifest.dtype)
    delivered = np.full(len(ids), -1, np.int64)

    places = np.argsort(ids, kind="stable")
    places = places[np.searchsorted(ids[places], 0) :]
    units = np.searchsorted(ends, ids[places], side="right")
    for part in np.split(places, np.flatnonzero(np.diff(units)) + 1):
        if not len(part):
            continue
        unit = int(np.searchsorted(ends, ids[part[0]], side="right"))
        shard, index, size = row_groups[unit]
        first_id = int(ends[unit]) - (size - 1) // seq_len
        rows = ids[part] - first_id
        group = read_row_group(directory, manifest, shard, index)
        tokens[part] = _overlapping_rows(group, seq_len)[rows]
        delivered[part] = first_id + rows
    return tokens, delivered


def _overlapping_rows(group: Tokens, seq_len: int) -> NDArray[np.unsignedinteger]:
    """View (sequences, seq_len + 1) of a row group: each row's last token is the next one's first."""
    rows = (len(group) - 1) // seq_len
    step = group.strides[0]
    return np.lib.stride_tricks.as_strided(
        group, (rows, seq_len + 1), (seq_len * step, step), writeable=False
    )
