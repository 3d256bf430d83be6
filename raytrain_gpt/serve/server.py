"""The `serve` command: a private Ray cluster on this machine with replicas, and a run to follow.

1. The address, the checkpoint and the API key are checked.
2. A Ray cluster starts on 127.0.0.1, and on it Ray Serve: a proxy at the address, and the replicas.
3. With `follow`, a thread polls the run's checkpoints and makes all replicas load a new best one.
4. On a signal, new requests are refused, running ones may finish, and everything is stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError

from raytrain_gpt.checkpoint.catalog import Checkpoint, resolve_checkpoint
from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.own_cluster import end_own_cluster
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config import kinds
from raytrain_gpt.errors import ClusterError, ConfigError, Interrupted, reason
from raytrain_gpt.format import Log, shell
from raytrain_gpt.serve.follow import Follower, describe_checkpoint
from raytrain_gpt.serve.replica import Replica
from raytrain_gpt.serve.serve_options import KEY_VARIABLE, ServeOptions
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location

APP = "raytrain-gpt"
FOLLOW_EVERY_S = 3.0
FINISH_TIMEOUT_S = 10.0
"""Time for requests to finish after a signal."""
SPARE_REQUESTS = 100
"""Requests that a replica accepts beyond its queue, so that it can refuse them itself with status 429."""
_ANSWER_TIMEOUT_S = {"served": 60.0, "load": 600.0}
_QUIET = {"log_level": "WARNING", "enable_access_log": False}


def serve_checkpoint(path: str, options: ServeOptions, say: Log) -> None:
    """Serve a checkpoint, or a run's best or else newest one, until a signal arrives.

    Raises:
        ConfigError: the address cannot be used, or needs an API key.
        CheckpointError: there is no checkpoint, or it is damaged.
        ClusterError: the machine has too few GPUs.
        Interrupted: Ctrl+C or SIGTERM.
    """
    check_can_listen(options)
    location = Location.of(path, retry_for_s=COMMAND_RETRY_S)
    checkpoint = resolve_checkpoint(location, say)
    if options.follow and checkpoint.path == location:
        raise ConfigError(f"--follow needs a run's directory, but {path} is a checkpoint")
    with StopSignals("interrupted before it served") as signals, _own_cluster(options, say) as gpus:
        say(f"loading {checkpoint.path}")
        handle = _deploy(str(location if options.follow else checkpoint.path), options, gpus)
        signals.defer()
        _announce(checkpoint, options, say)
        if options.follow:
            # In a thread, since loading takes minutes and a signal must not wait for it.
            args = (location, checkpoint, handle, signals.stop, say)
            threading.Thread(target=_follow, args=args, daemon=True).start()
        signals.stop.wait()
        say("stopping; requests in flight may finish")
        serve.delete(APP)
    raise Interrupted("stopped")


def _follow(
    run_dir: Location, checkpoint: Checkpoint, handle: Any, stop: threading.Event, say: Log
) -> None:
    def call(method: str, *args: str) -> list[Any]:
        try:
            timeout_s = _ANSWER_TIMEOUT_S[method]
            replies: list[Any] = handle.broadcast(method, *args).results(timeout_s=timeout_s)
            return replies
        except RayActorError:  # its message is a paragraph
            raise ClusterError("a replica has died; Ray Serve is starting a new one") from None

    def tell(line: str) -> None:
        if not stop.is_set():  # ignore failures caused by the shutdown
            say(line)

    follower = Follower(run_dir, checkpoint.hash, call, tell)
    while not stop.wait(FOLLOW_EVERY_S):
        follower.look()


def check_can_listen(options: ServeOptions) -> None:
    """Raise a ConfigError if the address is taken, not this machine's, or open without an API key."""
    host, port = options.host, options.port
    if not options.is_loopback and not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"host={host} is open to other machines; set {KEY_VARIABLE} to a key that they must send, or "
            "remove --host to serve this machine only"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Like the server, so that a port whose last connections are closing counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError) as error:  # a name too long for the internet is a UnicodeError
        raise ConfigError(
            f"cannot listen on {host} port {port} ({reason(error)}); set another --port or --host"
        ) from None


@contextlib.contextmanager
def _own_cluster(options: ServeOptions, say: Log) -> Iterator[int]:
    """Start a cluster with Ray Serve on this machine; yield its number of GPUs."""
    os.environ["RAY_ADDRESS"] = "local"
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        resources = connect(options.num_replicas, say)
        if 0 < resources.gpus < options.num_replicas:
            raise ClusterError(
                f"num_replicas={options.num_replicas} needs a GPU each, and this machine has "
                f"{resources.gpus}; set --num_replicas to at most {resources.gpus}"
            )
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": options.host, "port": options.port},
            logging_config=_QUIET,
        )
        yield resources.gpus
    finally:
        end_own_cluster()  # also ends Ray Serve, whose shutdown would warn about the tasks it kills


def _deploy(path: str, options: ServeOptions, gpus: int) -> Any:
    """Start the replicas; return a handle that calls them when they are ready."""
    cores = max(1, (os.cpu_count() or 1) // options.num_replicas)
    deployment = serve.deployment(serve.ingress()(Replica)).options(
        name=APP,
        num_replicas=options.num_replicas,
        max_ongoing_requests=options.max_batch + options.max_queue + SPARE_REQUESTS,
        graceful_shutdown_timeout_s=FINISH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": cores, "num_gpus": 1 if gpus else 0},
        logging_config=_QUIET,
    )
    bound = deployment.bind(path, options, options.needs_key, kinds.used_code())
    return serve.run(bound, name=APP, route_prefix="/")


def _announce(checkpoint: Checkpoint, options: ServeOptions, say: Log) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{options.port}"
    key = f"-H 'Authorization: Bearer '${KEY_VARIABLE} " * bool(os.environ.get(KEY_VARIABLE))
    say(f"serving {describe_checkpoint(checkpoint)} at {url}")
    say(
        f"next: curl {shell(f'{url}/v1/completions')} {key}-H 'Content-Type: application/json' "
        """-d '{"prompt": "Hello", "max_tokens": 32}', or open the page in a browser"""
    )
