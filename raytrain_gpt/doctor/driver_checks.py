"""What the driver alone can see: tokenizer, tracking, and room for checkpoints."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import location, run_location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.doctor.check import Failed, Skipped, checks
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.format import size
from raytrain_gpt.train import preflight

FETCH_WITHIN_S = 30.0
"""tiktoken's download has no limit of its own, and a firewall that drops packets gives no answer."""
TRACKER_ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


@checks("tokenizer")
def check_tokenizer(name: str | None, data: Mixture | None) -> str:
    """Whether `prepare --tokenizer NAME` would find its tokenizer, in the cache or by the network."""
    if name is None:
        if data is None:
            raise Skipped("no data, and no --tokenizer NAME for prepare")
        return f"the data carries its own, {data.tokenizer}"
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
    if not problem:
        return f"{name} is there for prepare"
    way = "" if "TIKTOKEN_CACHE_DIR" in problem[0] else "; fill TIKTOKEN_CACHE_DIR, or use bytes"
    raise Failed(f"{name}: {problem[0]}{way}")


@checks("tracking")
def check_tracking(config: Config) -> str:
    """Whether MLflow takes what a run would send it."""
    uri = config.tracking.mlflow_uri
    if uri is None:
        raise Skipped("mlflow_uri is null: no MLflow")
    if uri == "auto" and location(config, config.run.storage_path).is_local:
        return "MLflow's SQLite file goes into storage_path"
    if uri == "auto":
        raise Skipped("MLflow is off: its SQLite file cannot be in an object store; set mlflow_uri")
    if "://" not in uri or uri.startswith(preflight.SQLITE):
        directory = Path(uri.removeprefix(preflight.SQLITE)).parent
        if not os.access(directory, os.W_OK):
            raise Failed(
                f"mlflow_uri {uri}: cannot write in {directory}; create it, or set mlflow_uri"
            )
        return f"{directory} can be written"
    os.environ.update(TRACKER_ENVIRONMENT)  # a finding, not something to wait for
    from mlflow import MlflowClient

    try:
        MlflowClient(uri).search_experiments(max_results=1)
    except Exception as error:
        raise Failed(
            f"MLflow does not answer at {uri} ({root_cause(error)}); start it, open its port to the "
            "driver, or set mlflow_uri (null: no MLflow)"
        ) from None
    return f"MLflow answers at {uri}"


@checks("disk")
def check_disk(config: Config, data: Mixture | None) -> str:
    """Whether the checkpoints of the run have room."""
    storage = location(config, config.run.storage_path)
    if data is None:
        raise Skipped("without data the model's size is not known")
    if storage.is_local and not storage.exists():
        raise Skipped("there is no storage_path")
    existing = len(Catalog(run_location(config)).complete())
    preflight.check_disk(config, storage, data.vocab_size, existing)
    free = storage.free_bytes()
    room = "an object store, which has room" if free is None else f"{size(free)} free"
    return f"{storage}: {room}, enough for the checkpoints that are kept"
