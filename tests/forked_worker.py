"""Fork server for Ray worker processes, which have their shared imports done before the fork.

A run starts about ten worker processes, and each spends 2 to 5 s of CPU time on the same imports. On
clusters that tests start, this file replaces Ray's `setup_worker.py`, the program that becomes a worker.
It sends its arguments, environment and output files to a server. For each set of Ray variables, the server
has one process that imported Ray with these variables and forks the worker (docs/notebook/decisions.md).
The child runs Ray's `default_worker.py` as its main program, like any other worker.
None of the imports starts a Ray thread or opens a connection, which a child would inherit incompletely.
Clusters that commands start use Ray's usual worker startup.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from types import SimpleNamespace

ADDRESS = "RAYTRAIN_GPT_TEST_FORK_SERVER"
LIBRARIES = ("torch", "torch._dynamo", "pandas", "pyarrow.dataset", "requests", "boto3", "tiktoken")
LIBRARIES_ON_RAY = (
    "ray.data",
    "ray.train.torch",
    "raytrain_gpt.train.launch",
    "raytrain_gpt.train.rank",
)
MAX_ENVIRONMENTS = 4
"""Largest number of fork servers, one per set of Ray variables: two jobs with two sets each."""
LARGEST_REQUEST = 1 << 20
PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""
LANGUAGE, RUNTIME_ENV = "--language=", "--serialized-runtime-env-context="
"""Arguments that only `setup_worker.py` takes."""


def ask(arguments: list[str]) -> None:
    """Have the server fork the worker that this process was started to become."""
    mine, variables, directory = [], dict(os.environ), "."
    for argument in arguments:
        if argument.startswith(RUNTIME_ENV):  # runtime environment of the job or actor
            context = json.loads(argument.removeprefix(RUNTIME_ENV))
            variables |= context.get("env_vars", {})
            if context.get("command_prefix", [])[:1] == ["cd"]:  # its working_dir
                directory = context["command_prefix"][1]
        elif not argument.startswith(LANGUAGE):
            mine.append(argument)
    request = json.dumps([mine, variables, directory]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
        connection.connect(os.environ[ADDRESS])
        socket.send_fds(connection, [request], [0, 1, 2])
        connection.recv(1)  # wait for the fork


def serve(address: str) -> tuple[bytes, list[int]] | None:
    """Fork a worker for each request until stdin is closed.

    Returns the request and its files in the new worker, or None in the server.
    """
    for library in LIBRARIES:
        __import__(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit codes of workers are not needed
    # Workers outlive the server of their environment, and shall stay below the tests' process.
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    servers: dict[str, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                return None
            connection, _ = listener.accept()
            with connection:
                request, files, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
                variables = json.loads(request)[1].items()
                of_ray = {name: value for name, value in variables if name.startswith("RAY_")}
                key = json.dumps(of_ray, sort_keys=True)
                if key not in servers:
                    servers[key], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    servers[key].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
                    if os.fork() == 0:
                        for inherited in (listener, connection, *servers.values()):
                            inherited.close()
                        for file in files:
                            os.close(file)
                        os.environ.update(of_ray)
                        return serve_one_environment(theirs)
                    theirs.close()
                    if len(servers) > MAX_ENVIRONMENTS:
                        oldest = servers.pop(next(iter(servers)))
                        oldest.close()  # it forks the queued requests, then exits
                servers[key] = servers.pop(key)  # the last used one is the last to go
                socket.send_fds(servers[key], [request], [*files, connection.fileno()])
            for file in files:
                os.close(file)


def serve_one_environment(requests: socket.socket) -> tuple[bytes, list[int]] | None:
    """Fork the workers of a job that have the same Ray variables, which Ray reads at import."""
    import ray.actor

    class_id = ray.actor.ActorClassID
    # Ray's random generator, once used, would give all children the same task and object ids.
    ray.actor.ActorClassID = SimpleNamespace(  # type: ignore[misc, assignment]
        from_random=lambda: class_id(os.urandom(class_id.size()))
    )
    for library in LIBRARIES_ON_RAY:
        __import__(library)
    ray.actor.ActorClassID = class_id  # type: ignore[misc]
    gc.freeze()  # garbage collection in a child would write to shared memory, and so copy it
    while True:
        request, files, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 4)
        if not request:
            return None
        if os.fork() == 0:
            requests.close()
            os.close(files.pop())
            return request, files
        for file in files:
            os.close(file)


def become(request: bytes, files: list[int]) -> None:
    arguments, environment, directory = json.loads(request)
    os.chdir(directory)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # as in Ray, whose raylet kills the process group of an exited worker
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    sys.path[0] = os.path.dirname(arguments[0])  # noqa: PTH120 (pathlib is slow to import)
    runpy.run_path(arguments[0], run_name="__main__")


def ray_command() -> None:
    """Run `ray start` for a node that forks its workers."""
    from ray._private import ray_constants
    from ray.scripts.scripts import main

    ray_constants.SETUP_WORKER_FILENAME = __file__
    main()


if __name__ == "__main__":
    if sys.argv[1] == "start":
        ray_command()
    elif sys.argv[1] != "serve":
        ask(sys.argv[1:])
    elif (worker := serve(sys.argv[2])) is not None:
        become(*worker)
