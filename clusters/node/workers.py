"""Request GPU workers from the autoscaler and wait for them: `python workers.py NUM_GPUS`.

A run starts only where its workers fit, so request them first. The request stays, and replaces lost
machines, until 0 is requested; idle machines then stop after `idle_timeout_minutes`.
"""

import sys
import time

import ray
from ray.autoscaler.sdk import request_resources

POLL_S = 5.0


def main(num_gpus: int) -> None:
    """Request a total number of GPUs and print every change while waiting."""
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    request_resources(bundles=[{"GPU": 1}] * num_gpus)
    before = None
    while (there := int(ray.cluster_resources().get("GPU", 0))) < num_gpus:
        if there != before:
            print(f"waiting for GPUs: {there} of {num_gpus} have joined", flush=True)
        before = there
        time.sleep(POLL_S)
    print(f"{there} GPUs have joined, {num_gpus} requested")


if __name__ == "__main__":
    main(int(sys.argv[1]))
