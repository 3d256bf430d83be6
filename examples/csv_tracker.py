"""Tracker `csv`: the run's numbers in a file with the columns step, name, value.

    raytrain-gpt train --preset quickstart --code examples/csv_tracker.py --trackers csv

It may be slow and may raise: a queue calls it and retries failures.
"""

import csv

from raytrain_gpt.extend import Settings, tracker


class CsvSettings(Settings):
    csv_file: str = "rows.csv"
    """Name of the file, in the folder trackers of the run."""


@tracker("csv", CsvSettings)
class Csv:
    def __init__(self, run, settings):
        self.path = run.directory / "trackers" / settings.csv_file
        kept, self.is_new = [], not self.path.exists()  # a new file gets all rows
        if not self.is_new:  # by an earlier attempt; steps from run.first_step on come again
            with self.path.open(newline="") as file:
                kept = [row for row in csv.reader(file) if int(row[0]) < run.first_step]
        self.write("w", kept)

    def write(self, mode, rows):
        with self.path.open(mode, newline="") as file:
            csv.writer(file).writerows(rows)

    def rows(self, rows):
        numbers = [
            (row["step"], name, value)
            for row in rows
            for name, value in row.items()
            if "/" in name and isinstance(value, int | float)
        ]
        self.write("a", numbers)

    def text(self, step, name, text):
        self.write("a", [(step, name, text)])
