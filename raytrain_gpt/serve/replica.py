"""One copy of the model: what Ray Serve runs `num_replicas` times."""

from __future__ import annotations

import asyncio
import logging
import time

from ray.serve._private import replica as serve_replica
from starlette.applications import Starlette

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.evaluate.inference import open_checkpoint
from raytrain_gpt.serve.app import Limits, build_app
from raytrain_gpt.serve.engine import Engine, Weights
from raytrain_gpt.serve.follow import first_usable
from raytrain_gpt.storage.location import Location

logger = logging.getLogger(__name__)


class Replica:
    """Loads a checkpoint and answers requests with it.

    Args:
        checkpoint: A checkpoint, or a run: its best that is not damaged, also when this replica has to
            start again.
        limits: Of requests.
    """

    def __init__(self, checkpoint: str, limits: Limits) -> None:
        _listen_on_loopback_only()
        weights, loop = first_weights(checkpoint), asyncio.get_running_loop()
        self._engine = Engine(weights, loop, limits.max_batch, limits.max_queue)
        self._limits = limits

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._engine, self._limits)

    async def served(self) -> str:
        """Hash of the checkpoint that new requests are answered with."""
        return self._engine.weights.hash

    async def swap(self, checkpoint: str, checkpoint_hash: str) -> str | None:
        """Serve another checkpoint from the next request on; none is loaded that is served already.

        Returns:
            Why it cannot be served, None if it is.
        """
        if self._engine.weights.hash == checkpoint_hash:
            return None
        try:
            self._engine.weights = await asyncio.to_thread(load_weights, checkpoint)
        except Exception as error:  # as out of memory: the weights before go on
            return str(user_error_in(error) or root_cause(error))
        return None

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces the replica where this raises."""
        self._engine.check()


def _listen_on_loopback_only() -> None:
    """Where this process takes Ray Serve's own calls.

    Ray Serve 2.60 has every replica listen on all of the machine's addresses, for other deployments.
    It does so after the replica's constructor.
    """
    listen = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, _: listen(server, "127.0.0.1:0")


def first_weights(path: str) -> Weights:
    """The weights of a checkpoint, or of a run's best that is not damaged.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    def load(checkpoint: Checkpoint) -> Weights:
        return load_weights(str(checkpoint.path))

    return first_usable(Location.of(path), load, logger.warning)


def load_weights(path: str) -> Weights:
    """A checkpoint's model, every file compared with its hash.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoint, config, model, tokenizer, _ = open_checkpoint(path)
    return Weights(
        name=config.run.run_name,
        step=checkpoint.state.step,
        val_loss=checkpoint.val_loss,
        loaded_at=int(time.time()),
        model=model,
        tokenizer=tokenizer,
        hash=checkpoint.hash,
    )
