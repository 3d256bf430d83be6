"""The sequences behind each step, from the run's files (`data at`, `data find`).

A step's global batch number follows from its step number and the skipped batches; the data order lists the
batch's sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raytrain_gpt.checkpoint.branch import read_branch
from raytrain_gpt.checkpoint.catalog import Catalog, read_skipped
from raytrain_gpt.checkpoint.code_check import stored_code
from raytrain_gpt.columns import Row
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import make_order, read_data, recorded, recorded_data
from raytrain_gpt.data.order import Ids, batches_to_read
from raytrain_gpt.data.shards import read_row_group
from raytrain_gpt.data.tokenizer import valid_text
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.format import count, preview
from raytrain_gpt.runs.goodput import read_attempts
from raytrain_gpt.runs.listing import open_run
from raytrain_gpt.storage.location import Location, LocationLike
from raytrain_gpt.trackers.run_files import CONFIG_FILE, read_rows

_SHOWN_CHARACTERS = 100
_NO_TEXT = b"\xff"
"""Stand-in for special tokens; it is invalid UTF-8, so no match spans documents."""


@dataclass(frozen=True)
class TrainedSequence:
    """A sequence of a step.

    Attributes:
        id: Index in the combined train split.
        row: First row in the shard's parquet file.
        text: All tokens, including the last target.
    """

    id: int
    dataset: str
    shard: str
    row: int
    text: str


class RunProvenance:
    """A run's steps and their data.

    Args:
        place: Its directory or URL.
        data: Dataset as in `data_path`, or None for the one recorded in the run's files.

    Attributes:
        begins_at: Steps of the run that this one branched from.
        steps: Step -> its recorded row.

    Raises:
        UserError: there is no such run, it is damaged, or its dataset is missing or has changed.
    """

    def __init__(self, place: LocationLike, data: str | None = None) -> None:
        sync = open_run(Location.of(place))
        self.dir = sync.run_dir
        stored = load_config_file(sync.work_dir / CONFIG_FILE)
        self.newest = newest = next(reversed(Catalog(self.dir).complete()), None)
        self.latest = config = recorded(stored.model_dump(), str(self.dir), BUILT_IN)
        if newest is not None:  # the file may have been edited
            kept = recorded(newest.state.config, str(newest.path), BUILT_IN)
            config = kept.updated({"data_path": stored.data.data_path})
        self.config = config
        self.data = recorded_data(config, self.dir) if data is None else read_data(config, data)
        self.seq_len = self.config.data.seq_len
        self.order = make_order(self.config, self.data)
        if newest is not None and newest.state.manifest_hash != self.data.hash:
            raise DataError(
                f"run {self.dir} was trained on different data than {data or self.config.data.data_path} "
                "has now; restore the old dataset, or pass it as --data"
            )
        self.skipped = read_skipped(self.dir, newest)
        self._branch = branch = read_branch(self.dir)
        self.begins_at, self._first = (branch.step, branch.next_batch) if branch else (0, 0)
        counts = [p.manifest.row_group_sequences("train", self.seq_len) for p in self.data.datasets]
        self._starts = [np.cumsum(sequences) - sequences for sequences in counts]
        self.rows = read_rows(sync.work_dir)
        self.attempts = read_attempts(self.rows)
        most = max(self.config.train.max_steps, self.latest.train.max_steps)
        steps = (row for row in self.rows if "train/loss" in row and row["step"] <= most)
        self.steps = {row["step"]: row for row in steps}
        self.last_step = max(self.steps, default=0)
        self._tokenizer = read_tokenizer(self.data.datasets[0].directory)

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield every step of this run with its global batch."""
        step = self.begins_at
        for start, stop in batches_to_read(self._first, self.last_step - step, self.skipped):
            for batch in range(start, stop):
                step += 1
                yield step, batch

    def batch_of(self, step: int) -> int:
        """Return the global batch of a step; raises ConfigError if the run has no such step."""
        before = self.begins_at
        if not before < step <= self.last_step:
            earlier = f"; earlier steps belong to {self._branch.checkpoint}" if self._branch else ""
            raise ConfigError(
                f"step {step}: run {self.dir} has trained steps {before + 1} to "
                f"{self.last_step}{earlier}; set --step to one of them"
            )
        return batches_to_read(self._first, step - before, self.skipped)[-1][1] - 1

    def attempt_of(self, step: int) -> Row:
        """Return the events that started a step's attempt, as one row; raises ConfigError without them."""
        for attempt in self.attempts:
            if step in attempt.kept:
                return attempt.row
        raise ConfigError(f"{self.dir} does not record the workers of step {step}; give another")

    def source_of(self, step: int) -> tuple[Config, str | None, Location]:
        """Return the settings of a step's attempt, the SHA-256 of its code and a directory with that code.

        Raises a ConfigError if it is not the last attempt, and all of its checkpoints are gone.
        """
        kept = next(one.kept for one in self.attempts if step in one.kept)
        for saved in Catalog(self.dir).complete():
            if saved.state.step in kept:
                config = recorded(saved.state.config, str(saved.path), BUILT_IN)
                return config, saved.state.code_sha256, saved.path
        if self.last_step not in kept:
            raise ConfigError(
                f"{self.dir} has no checkpoint left of the attempt that trained step {step}, so its settings "
                "are unknown; give a later step"
            )
        code = stored_code(self.dir)
        return self.latest, code.sha256 if code else None, self.dir

    def step(self, step: int, worker: int | None = None) -> list[TrainedSequence]:
        """Return the sequences of a step, or of one worker in it; raises ConfigError if it had none."""
        ids = self.order.batch_ids(self.batch_of(step))
        if worker is not None:
            if worker >= (num := self.attempt_of(step)["num_workers"]):
                raise ConfigError(
                    f"--worker {worker}: step {step} had {count(num, 'worker')}; set it to 0 to {num - 1}"
                )
            ids = np.split(ids, num)[worker]
        return self._described(ids)

    def batch(self, batch: int) -> list[TrainedSequence]:
        """Return the sequences of a global batch, even one that a rollback skipped."""
        return self._described(self.order.batch_ids(batch))

    def _described(self, ids: Ids) -> list[TrainedSequence]:
        tokens, _ = self.data.read("train", self.seq_len, ids)
        first_ids = np.cumsum([0, *self.data.num_sequences("train", self.seq_len)])
        sequences = []
        for sequence, own_tokens in zip(ids.tolist(), tokens, strict=True):
            at = int(np.searchsorted(first_ids, sequence, side="right")) - 1
            dataset, starts = self.data.datasets[at], self._starts[at]
            index_in_dataset = sequence - int(first_ids[at])
            group = int(np.searchsorted(starts, index_in_dataset, side="right")) - 1
            ((shard, index),) = dataset.manifest.find_row_groups("train", np.array([group]))
            in_group = (index_in_dataset - int(starts[group])) * self.seq_len
            sequences.append(
                TrainedSequence(
                    id=sequence,
                    dataset=self.data.names[at],
                    shard=shard.path,
                    row=index * dataset.manifest.row_group_tokens + in_group,
                    text=self._tokenizer.decode(own_tokens.tolist()),
                )
            )
        return sequences

    def find(self, text: str) -> dict[str, Any]:
        """Find the `steps` that had a text inside one of their sequences, each with those.

        `cut` counts occurrences split across two sequences or row groups, which no step has in full.
        """
        if not text:
            raise ConfigError("the text to find is empty; give some words of it")
        if text == valid_text(text):  # else it is not UTF-8
            text = self._tokenizer.normalized(text)
        ids, cut = self._ids_with(text.encode("utf-8", "surrogateescape"))
        steps = []
        for step, batch in self.batches():
            hits = self.order.batch_ids(batch)
            hits = hits[np.isin(hits, ids)]
            if len(hits):
                sequences = [asdict(sequence) for sequence in self._described(hits)]
                steps.append({"step": step, "sequences": sequences})
        return {"steps": steps, "cut": cut}

    def _ids_with(self, text: bytes) -> tuple[Ids, int]:
        """Return the ids of sequences that contain a text, and the number of split occurrences."""
        tokenizer, size = self._tokenizer, self.seq_len
        table = [
            tokenizer.token_bytes(token) if num_bytes else _NO_TEXT
            for token, num_bytes in enumerate(tokenizer.lengths)
        ]
        lengths = np.array([len(one) for one in table])
        first_id = cut = 0
        ids: list[int] = []
        for dataset in self.data.datasets:
            counts = dataset.manifest.row_group_sequences("train", self.seq_len)
            groups = dataset.manifest.find_row_groups("train", np.arange(len(counts)))
            for (shard, index), num in zip(groups, counts.tolist(), strict=True):
                tokens = read_row_group(dataset.directory, dataset.manifest, shard, index)
                content = b"".join([table[token] for token in tokens.tolist()])
                ends = np.cumsum(lengths[tokens])
                at = content.find(text)
                while at >= 0:
                    begins = int(np.searchsorted(ends, at, side="right"))
                    last = int(np.searchsorted(ends, at + len(text) - 1, side="right"))
                    # A sequence's last token is also the first of the next, so two may contain the text.
                    first = max(0, -(-(last - size) // size))
                    having = range(first_id + first, first_id + min(begins // size + 1, num))
                    ids += having
                    cut += not having
                    at = content.find(text, at + 1)
                first_id += num
        return np.unique(np.array(ids, np.int64)), cut


def describe_sequence(sequence: Mapping[str, Any]) -> str:
    """Format the attributes of a `TrainedSequence` on one line, with its text shortened."""
    where = "sequence {id} | {dataset} {shard} row {row}".format(**sequence)
    return f"{where} | {preview(sequence['text'], _SHOWN_CHARACTERS)}"
