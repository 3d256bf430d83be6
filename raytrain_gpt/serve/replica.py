"""One copy of the model; Ray Serve runs `num_replicas` of them."""

from __future__ import annotations

import asyncio
import logging
import time

from ray.serve._private import replica as serve_replica
from starlette.applications import Starlette

from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.config import kinds
from raytrain_gpt.config.code import Code
from raytrain_gpt.evaluate.inference import open_checkpoint
from raytrain_gpt.format import Log
from raytrain_gpt.serve.app import build_app
from raytrain_gpt.serve.engine import Engine, Weights
from raytrain_gpt.serve.serve_options import ServeOptions
from raytrain_gpt.storage.location import Location, LocationLike

logger = logging.getLogger(__name__)


class Replica:
    """Server of one loaded checkpoint, or of a run's best undamaged one, also after a restart."""

    def __init__(
        self, path: str, options: ServeOptions, needs_key: bool, code: Code | None
    ) -> None:
        _listen_on_loopback_only()
        kinds.use(code)
        weights = load_weights(path, logger.warning)
        loop = asyncio.get_running_loop()
        self._engine = Engine(weights, loop, options.max_batch, options.max_queue)
        self._options, self._needs_key = options, needs_key

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._engine, self._options, self._needs_key)

    async def served(self) -> str:
        return self._engine.weights.hash

    async def load(self, path: str, checkpoint_hash: str) -> str | None:
        """Load a checkpoint for new requests, unless it is in use; return the reason if that fails."""
        if self._engine.weights.hash == checkpoint_hash:
            return None
        try:
            self._engine.weights = await asyncio.to_thread(load_weights, path)
        except Exception as error:  # for example out of memory; the old weights stay in use
            return str(user_error_in(error) or root_cause(error))
        return None

    def check_health(self) -> None:
        self._engine.check()


def _listen_on_loopback_only() -> None:
    """Restrict the port on which this process receives Ray Serve's calls.

    Ray Serve 2.60 lets every replica listen on all of the machine's addresses. It opens the port after the
    replica's constructor, so the constructor can still change that.
    """
    listen = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, _: listen(server, "127.0.0.1:0")


def load_weights(path: LocationLike, on_skip: Log | None = None) -> Weights:
    """Load a verified checkpoint, or raise a CheckpointError; `on_skip` as in `resolve_checkpoint`."""
    checkpoint, config, model, tokenizer, _ = open_checkpoint(Location.of(path), on_skip=on_skip)
    return Weights(
        name=config.run.run_name,
        step=checkpoint.state.step,
        val_loss=checkpoint.val_loss,
        loaded_at=int(time.time()),
        model=model,
        tokenizer=tokenizer,
        hash=checkpoint.hash,
    )
