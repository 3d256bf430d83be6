"""What the driver alone can see: tokenizer, tracking, and room for checkpoints."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import location, run_location
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.doctor.check import Check, failed, passed, skipped
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.format import size
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train import preflight

FETCH_WITHIN_S = 30.0
"""tiktoken's download has no limit of its own, and a firewall that drops packets gives no answer."""
TRACKER_ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


def check_named_tokenizer(name: str) -> Check:
    """Whether `prepare --tokenizer NAME` would find its tokenizer, cached or by the network."""
    problem = [f"it was not there within {FETCH_WITHIN_S:g} s"]

    def fetch() -> None:
        try:
            load_tokenizer(name)
            problem.clear()
        except RaytrainGptError as error:
            problem[:] = [str(error)]

    thread = threading.Thread(target=fetch, name="tokenizer", daemon=True)
    thread.start()
    thread.join(FETCH_WITHIN_S)
    if problem:
        remedy = (
            "" if "TIKTOKEN_CACHE_DIR" in problem[0] else "; fill TIKTOKEN_CACHE_DIR, or use bytes"
        )
        return failed("tokenizer", f"{name}: {problem[0]}{remedy}")
    return passed("tokenizer", f"{name} is there for prepare")


def check_tracking(config: Config) -> Check:
    """Whether MLflow takes what a run would send it."""
    uri = config.tracking.mlflow_uri
    if uri is None:
        return skipped("tracking", "mlflow_uri is null: no MLflow")
    if uri == "auto":
        if not location(config, config.run.storage_path).is_local:
            return skipped(
                "tracking",
                "MLflow is off: its SQLite file cannot be in an object store; set mlflow_uri",
            )
        return passed("tracking", "MLflow's SQLite file goes into storage_path")
    if "://" not in uri or uri.startswith(preflight.SQLITE):
        directory = Path(uri.removeprefix(preflight.SQLITE)).parent
        if not os.access(directory, os.W_OK):
            wrong = f"mlflow_uri {uri}: cannot write in {directory}"
            return failed("tracking", f"{wrong}; make it, or set mlflow_uri")
        return passed("tracking", f"{directory} can be written")
    from mlflow import MlflowClient

    try:
        with _environment(TRACKER_ENVIRONMENT):
            MlflowClient(uri).search_experiments(max_results=1)
    except Exception as error:
        return failed(
            "tracking",
            f"MLflow does not answer at {uri} ({root_cause(error)}); start it, open its port to "
            "the driver, or set mlflow_uri (null: no MLflow)",
        )
    return passed("tracking", f"MLflow answers at {uri}")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check_disk(config: Config, storage: Location, vocab_size: int) -> Check:
    """Whether the checkpoints of the run have room."""
    run_dir = run_location(config)
    try:
        preflight.check_disk(config, storage, vocab_size, len(Catalog(run_dir).complete()))
    except RaytrainGptError as error:
        return failed("disk", str(error))
    free = storage.free_bytes()
    room = "an object store, which has room" if free is None else f"{size(free)} free"
    return passed("disk", f"{storage}: {room}, enough for the checkpoints that are kept")
