"""Rows that a tracker has, so that a new attempt sends those that an outage or a kill kept from it."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from raytrain_gpt.tracking.run_files import Row


class Delivered(BaseModel):
    """Rows that a tracker has.

    Attributes:
        step: Last training step; later ones are new.
        evaluated: Steps of evaluations, one by one: one from a checkpoint may come after a later step's.
        event_s: Time of the last event (Unix seconds).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step: int = 0
    evaluated: frozenset[int] = frozenset()
    event_s: float = 0.0

    def until(self, step: int) -> Delivered:
        """Return the state in which later steps are new."""
        evaluated = frozenset(at for at in self.evaluated if at <= step)
        return Delivered(step=min(self.step, step), evaluated=evaluated, event_s=self.event_s)

    def take(self, rows: Iterable[Row], resumed_at: int) -> tuple[list[Row], Delivered]:
        """Return the new ones of an attempt's rows, and the state once the tracker has them.

        Args:
            resumed_at: Step at which the attempt resumed. Above it, steps after a rollback are new again.
        """
        new: list[Row] = []
        step, evaluated, event_s = self.step, set(self.evaluated), self.event_s
        for row in rows:
            at = row["step"]
            if "event" in row:
                if (time_s := row.get("time", 0.0)) <= self.event_s:
                    continue
                event_s = max(event_s, time_s)
                if row["event"] == "rollback" and at > resumed_at:
                    step = min(step, row["to_step"])
                    evaluated = {one for one in evaluated if one <= step}
            elif "train/loss" in row:
                if at <= step:
                    continue
                step = at
            elif at in evaluated:
                continue
            else:
                evaluated.add(at)
            new.append(row)
        return new, Delivered(step=step, evaluated=frozenset(evaluated), event_s=event_s)
