"""The `serve` command: a cluster of its own on this machine, replicas on it, and a run to follow.

1. What would fail is looked at first: the address, the checkpoint, the API key.
2. A Ray cluster starts on 127.0.0.1, on it Ray Serve: a proxy at the address, and the replicas.
3. With `follow` a thread looks at the run's catalog every few seconds; a new best checkpoint is
   verified, and all replicas are told to load it (follow.py).
4. On a signal no new request is taken, those in flight may finish, and everything is stopped.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError

from raytrain_gpt.checkpoint.catalog import Checkpoint, resolve_checkpoint
from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.errors import ClusterError, ConfigError, Interrupted
from raytrain_gpt.serve.app import KEY_VARIABLE, Limits
from raytrain_gpt.serve.follow import Follower, described, first_usable
from raytrain_gpt.serve.replica import Replica
from raytrain_gpt.storage.location import Location

APP = "raytrain-gpt"
FOLLOW_EVERY_S = 3.0
FINISH_WITHIN_S = 10.0
"""How long requests may go on after a signal."""
SWAP_WITHIN_S = 600.0
ANSWER_WITHIN_S = 60.0
SPARE_REQUESTS = 100
"""Requests of a replica besides those that wait for the model, so that it can refuse and tell."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class ServeOptions:
    """How a checkpoint is served.

    Attributes:
        host: Address to listen on.
        port: Of it.
        max_batch: Sequences that a replica continues at a time.
        max_queue: Sequences that may wait for a replica.
        max_new_tokens: Most of a continuation; None: as many as the context has.
        num_replicas: Copies of the model.
        follow: Serve the run's new best checkpoints as they come.

    Raises:
        ConfigError: a number is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32
    max_queue: int = 256
    max_new_tokens: int | None = None
    num_replicas: int = 1
    follow: bool = False

    def __post_init__(self) -> None:
        least = {"port": 1, "max_batch": 1, "max_queue": 0, "max_new_tokens": 1, "num_replicas": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(
                    f"{name}={value} is below {lowest}; set --{name} to {lowest} or more"
                )
        if self.port > 65535:
            raise ConfigError(f"port={self.port} is above 65535; set --port to at most 65535")

    @property
    def limits(self) -> Limits:
        """What a replica takes."""
        own = {"localhost", "127.0.0.1", "[::1]", self.host.lower()}
        loopback = is_loopback(self.host)
        return Limits(
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            max_new_tokens=self.max_new_tokens,
            hosts=frozenset(own) if loopback else None,
            needs_key=not loopback or bool(os.environ.get(KEY_VARIABLE)),
        )


def serve_checkpoint(path: str, options: ServeOptions, say: Say) -> None:
    """Serve until a signal comes.

    Args:
        path: A checkpoint, or a run: its best, else newest.
        options: How.
        say: Gets console lines.

    Raises:
        ConfigError: the address cannot be used, or needs an API key.
        CheckpointError: there is no checkpoint, or it is damaged.
        ClusterError: the machine has too few GPUs.
        Interrupted: Ctrl+C or SIGTERM.
    """
    check_address(options.host, options.port)
    location = Location.of(path)
    checkpoint = _resolved(location, options.follow, say)
    if options.follow and checkpoint.path == location:
        raise ConfigError(f"--follow needs a run's directory, and {path} is one checkpoint")
    with StopSignals("interrupted before it served") as signals, _own_cluster(options) as gpus:
        say(f"loading {checkpoint.path}")
        handle = _deploy(str(location if options.follow else checkpoint.path), options, gpus)
        signals.defer()
        _announce(checkpoint, options, say)
        if options.follow:

            def tell(line: str) -> None:
                if not signals.stop.is_set():  # what fails then has no other reason
                    say(line)

            follower = Follower(location, checkpoint.hash, _Deployed(handle), tell)
            # Not in this thread: a swap takes minutes, and a signal must not wait for it.
            threading.Thread(target=_follow, args=(follower, signals.stop), daemon=True).start()
        signals.stop.wait()
        say("stopping; requests in flight may finish")
        serve.delete(APP)
    raise Interrupted("stopped")


def _resolved(location: Location, follow: bool, say: Say) -> Checkpoint:
    """The checkpoint to begin with; of a run that is followed, damaged ones are passed over."""

    def verified(checkpoint: Checkpoint) -> Checkpoint:
        checkpoint.verify()
        return checkpoint

    return first_usable(location, verified, say) if follow else resolve_checkpoint(location)


def _follow(follower: Follower, stop: threading.Event) -> None:
    while not stop.wait(FOLLOW_EVERY_S):
        follower.look()


def check_address(host: str, port: int) -> None:
    """See that one may listen there.

    Raises:
        ConfigError: the address is open to others and there is no API key, or it is taken or not ours.
    """
    if not is_loopback(host) and not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"host={host} is open to other machines; set {KEY_VARIABLE}, which they must send, or "
            "leave --host out to serve this machine alone"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the server does it: a port whose last connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}); set --port or --host to others"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@contextlib.contextmanager
def _own_cluster(options: ServeOptions) -> Iterator[int]:
    """A cluster with Ray Serve on this machine, and its GPUs; everything of it ends with the context."""
    given = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = "local"
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        resources = connect(num_cpus_needed=options.num_replicas)
        if 0 < resources.gpus < options.num_replicas:
            raise ClusterError(
                f"{options.num_replicas} replicas need a GPU each, and there are {resources.gpus}; "
                f"set --num_replicas to at most {resources.gpus}"
            )
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": options.host, "port": options.port},
            logging_config=_QUIET,
        )
        yield resources.gpus
    finally:
        ray.shutdown()  # ends Ray Serve too; its own shutdown complains about tasks that it killed
        if given is None:
            del os.environ["RAY_ADDRESS"]
        else:
            os.environ["RAY_ADDRESS"] = given


_QUIET = {"log_level": "WARNING", "enable_access_log": False}


def _deploy(checkpoint: str, options: ServeOptions, gpus: int) -> Any:
    """Start the replicas; returns the handle that calls them once they are ready."""
    limits = options.limits
    cores = max(1, (os.cpu_count() or 1) // options.num_replicas)
    deployment = serve.deployment(serve.ingress()(Replica)).options(
        name=APP,
        num_replicas=options.num_replicas,
        max_ongoing_requests=limits.max_batch + limits.max_queue + SPARE_REQUESTS,
        graceful_shutdown_timeout_s=FINISH_WITHIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": cores, "num_gpus": 1 if gpus else 0},
        logging_config=_QUIET,
    )
    return serve.run(deployment.bind(checkpoint, limits), name=APP, route_prefix="/")


@dataclass(frozen=True)
class _Deployed:
    """The replicas that run, behind Ray Serve's handle."""

    handle: Any

    def served(self) -> list[str]:
        return self._asked(ANSWER_WITHIN_S, "served")

    def swap(self, checkpoint: Checkpoint) -> list[str | None]:
        return self._asked(SWAP_WITHIN_S, "swap", str(checkpoint.path), checkpoint.hash)

    def _asked(self, within_s: float, *call: str) -> list[Any]:
        try:
            replies: list[Any] = self.handle.broadcast(*call).results(timeout_s=within_s)
            return replies
        except RayActorError:  # whose text is a paragraph
            raise ClusterError("a replica has ended; another one is started for it") from None


def _announce(checkpoint: Checkpoint, options: ServeOptions, say: Say) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{options.port}"
    key = f"-H 'Authorization: Bearer '${KEY_VARIABLE} " * bool(os.environ.get(KEY_VARIABLE))
    say(f"serving {described(checkpoint)} at {url}")
    say(
        f"next: curl {url}/v1/completions {key}-H 'Content-Type: application/json' "
        """-d '{"prompt": "Hello", "max_tokens": 32}', or open the page in a browser"""
    )
