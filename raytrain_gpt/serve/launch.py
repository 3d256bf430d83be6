"""The `serve` command: a cluster of its own on this machine, replicas on it, and a run to follow.

1. What would fail is looked at first: the address, the checkpoint, the API key.
2. A Ray cluster starts on 127.0.0.1, on it Ray Serve: a proxy at the address, and the replicas.
3. With `follow` the run's catalogue is looked at every few seconds; a new best checkpoint is verified,
   and all replicas are told to load it.
4. On a signal no new request is taken, those in flight may finish, and everything is stopped.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve

from raytrain_gpt.data.storage import Location
from raytrain_gpt.errors import ClusterError, ConfigError, Interrupted
from raytrain_gpt.runtime import cluster
from raytrain_gpt.runtime.checkpoints import Catalogue, Checkpoint, resolve_checkpoint
from raytrain_gpt.runtime.failures import root_cause, user_error_in
from raytrain_gpt.runtime.signals import StopSignals
from raytrain_gpt.serve.app import KEY_VARIABLE, Limits
from raytrain_gpt.serve.replica import Replica

APP = "raytrain-gpt"
FOLLOW_EVERY_S = 3.0
FINISH_WITHIN_S = 10.0
"""How long requests may go on after a signal."""
SWAP_WITHIN_S = 600.0
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
        hosts = frozenset(own) if is_loopback(self.host) else None
        return Limits(self.max_batch, self.max_queue, self.max_new_tokens, hosts)


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
    checkpoint = resolve_checkpoint(location)
    if options.follow and checkpoint.path == location:
        raise ConfigError(f"--follow needs a run's directory, and {path} is one checkpoint")
    with StopSignals("interrupted before it served") as signals, _own_cluster(options) as gpus:
        say(f"loading {checkpoint.path}")
        handle = _deploy(str(location if options.follow else checkpoint.path), options, gpus)
        signals.defer()
        _announce(checkpoint, options, say)
        follower = Follower(location, checkpoint, _swapper(handle), say)
        while not signals.stop.wait(FOLLOW_EVERY_S if options.follow else None):
            follower.look()
        say("stopping; requests in flight may finish")
        serve.delete(APP)
    raise Interrupted("stopped")


class Follower:
    """Hands a run's newest best checkpoint on.

    Args:
        run_dir: Of the run.
        served: That is served now.
        swap: Has all replicas serve another one; tells why one cannot.
        say: Gets a line for each change, and for each checkpoint that cannot be served.
    """

    def __init__(
        self, run_dir: Location, served: Checkpoint, swap: Callable[[str], list[str]], say: Say
    ) -> None:
        self._catalogue = Catalogue(run_dir)
        self._swap, self._say = swap, say
        self._seen = served
        self._told = ""

    def look(self) -> None:
        """Serve a new best checkpoint if there is one; one that is damaged is passed over."""
        try:
            complete = self._catalogue.complete()
            best = self._catalogue.best() or (complete[-1] if complete else self._seen)
            if best.hash == self._seen.hash:
                return
            best.verify()
            problems = self._swap(str(best.path))
        except Exception as error:  # whatever it is, the weights before go on
            problems = [str(user_error_in(error) or root_cause(error))]
        if problems:
            self._tell(f"skipped: {problems[0]}")
            return
        self._seen = best
        self._tell(f"serving {_described(best)}; requests before it end on the weights before")

    def _tell(self, line: str) -> None:
        """Once, however often it is found again."""
        if line != self._told:
            self._say(line)
        self._told = line


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
        resources = cluster.connect(num_cpus_needed=options.num_replicas)
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


def _swapper(handle: Any) -> Callable[[str], list[str]]:
    def swap(path: str) -> list[str]:
        replies = handle.broadcast("swap", path).results(timeout_s=SWAP_WITHIN_S)
        return [reply for reply in replies if reply is not None]

    return swap


def _announce(checkpoint: Checkpoint, options: ServeOptions, say: Say) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{options.port}"
    key = f"-H 'Authorization: Bearer '${KEY_VARIABLE} " * bool(os.environ.get(KEY_VARIABLE))
    say(f"serving {_described(checkpoint)} at {url}")
    say(
        f"next: curl {url}/v1/completions {key}-H 'Content-Type: application/json' "
        """-d '{"prompt": "Hello", "max_tokens": 32}', or open the page in a browser"""
    )


def _described(checkpoint: Checkpoint) -> str:
    loss = checkpoint.val_loss
    return f"{checkpoint.path}{'' if loss is None else f' (val loss {loss:.4f})'}"
