"""Pages that load nothing else: templates that escape every text, and the formats in them."""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from raytrain_gpt.format import amount, duration, look_at_batch, number, short_duration, size
from raytrain_gpt.redact import printable
from raytrain_gpt.tracking.charts import draw
from raytrain_gpt.tracking.run_files import Row, event_text
from raytrain_gpt.version import VERSION


def page(template: str, **values: Any) -> str:
    """Fill in a template, given by its path in the package."""
    now = _utc(datetime.now(UTC).timestamp())
    return printable(
        _environment().get_template(template).render(version=VERSION, now=now, **values)
    )


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent.parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"draw": draw, "fixed": _fixed, "yaml": yaml_text, "utc": _utc}
    environment.filters |= {"amount": amount, "size": size, "thousands": "{:,}".format}
    environment.filters |= {"duration": duration, "short_duration": short_duration}
    environment.filters |= {"event_text": event_text, "look_at": look_at_batch}
    return environment


def _fixed(row: Row | None, key: str, form: str = ".4f") -> str:
    """Format a row's number, with a dash if it is missing and words if it is null."""
    return "–" if row is None or key not in row else number(row[key], form)


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def yaml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
