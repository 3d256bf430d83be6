"""Ask the autoscaler for workers, and wait until they are there: `python workers.py NUM_GPUS`.

A run starts where its workers fit, so ask first. What was asked for stays, and comes again when it is
taken away, until 0 is asked for; then idle machines go after `idle_timeout_minutes`.
"""

import sys
import time

import ray
from ray.autoscaler.sdk import request_resources

POLL_S = 5.0


def main(num_gpus: int) -> None:
    """Ask for GPUs in all, of which there may be some; a line for every change."""
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    request_resources(bundles=[{"GPU": 1}] * num_gpus)
    before = None
    while (there := int(ray.cluster_resources().get("GPU", 0))) < num_gpus:
        if there != before:
            print(f"{there} of {num_gpus} GPUs are there, waiting", flush=True)
        before = there
        time.sleep(POLL_S)
    print(f"{there} GPUs are there, {num_gpus} are asked for")


if __name__ == "__main__":
    main(int(sys.argv[1]))
