"""Worker processes for the shared cluster, forked from one process that has imported what they need.

A run starts about ten worker processes (ranks, the controller, data tasks), and each would import Ray,
torch and this package anew: five seconds of a core. Here Ray's raylet starts this file instead of its own
`setup_worker.py`. It hands its command line, environment and files to a server, whose child becomes
the worker:

    raylet -> python forked_workers.py ARGUMENTS -> server (imported everything) -> fork: default_worker.py

A worker with a Python path or program of its own is started as Ray does it. Clusters that tests
start by themselves use Ray's own way.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET_VARIABLE = "RAYTRAIN_GPT_TEST_WORKERS"
CONTEXT_FLAG = "--serialized-runtime-env-context="
LANGUAGE_FLAG = "--language="
IMPORTED = (
    "ray._private.workers.default_worker",
    "ray.data",
    "ray.train.torch",
    "torch._dynamo",  # which every optimizer imports
    "raytrain_gpt.evaluate.async_evaluation",
    "raytrain_gpt.train.attempt",
    "raytrain_gpt.train.worker",
)
MAX_MESSAGE_BYTES = 1 << 20


@contextmanager
def worker_server(directory: Path) -> Iterator[dict[str, str]]:
    """The server that forks workers, and the variables of a raylet that uses it.

    Args:
        directory: Where the server's socket is made; its path must be short.
    """
    place = str(directory / "workers")
    # One thread: those of a library would not be there in a child.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            env=environment,
            stdin=subprocess.PIPE,  # ends with this process, however that ends
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    yield {SOCKET_VARIABLE: place}
    server.kill()
    server.wait()


def start_as_ray_does(arguments: list[str]) -> None:
    """Become Ray's own `setup_worker.py`."""
    import ray._private.workers

    setup = Path(ray._private.workers.__file__).with_name("setup_worker.py")
    os.execv(sys.executable, [sys.executable, str(setup), *arguments])


def hand_over(arguments: list[str]) -> None:
    """In the process that the raylet started: have the server's child do the work."""
    for argument in arguments:
        if argument.startswith(CONTEXT_FLAG):
            context = json.loads(argument.removeprefix(CONTEXT_FLAG) or "{}")
            special = "PYTHONPATH" in (context.get("env_vars") or {})
            special |= context.get("py_executable", sys.executable) != sys.executable
            if special or context.get("command_prefix"):
                start_as_ray_does(arguments)
    job = {"arguments": arguments, "environment": dict(os.environ), "directory": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[SOCKET_VARIABLE])
        socket.send_fds(connection, [json.dumps(job).encode()], [0, 1, 2])


def serve(listener: socket.socket) -> list[str]:
    """Fork for each job; returns in the children alone, with the job's arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
        connection.close()
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    else:
        sys.exit()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    job = json.loads(message)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["directory"])
    arguments: list[str] = job["arguments"]
    return arguments


def work(arguments: list[str]) -> None:
    """In the child: be the worker that the raylet wanted."""
    import runpy

    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._raylet import Config

    for argument in arguments:
        if argument.startswith(CONTEXT_FLAG):
            update_envs(RuntimeEnvContext.deserialize(argument.removeprefix(CONTEXT_FLAG)).env_vars)
    arguments = [a for a in arguments if not a.startswith((CONTEXT_FLAG, LANGUAGE_FLAG))]
    Config.initialize("")  # from the environment, which was another one when Ray was imported
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """The server, where it is given its socket's file; else the process that a raylet started."""
    if not sys.argv[1].isdigit():
        hand_over(sys.argv[1:])
        return
    listener = socket.socket(fileno=int(sys.argv[1]))
    sys.path[0] = str(Path(__file__).parents[1])
    import gc
    import importlib

    import ray

    for name in IMPORTED:
        importlib.import_module(name)
    # Finds where the title stands in memory, which is before the variables; the children change those.
    ray._raylet.setproctitle("forked_workers")
    gc.freeze()  # the children's collections touch nothing of this, so that it stays shared
    work(serve(listener))


if __name__ == "__main__":
    main()
