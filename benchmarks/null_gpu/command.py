"""Run a command of the product on the null GPU.

    run.sh -- benchmarks/null_gpu/command.py train --use_gpu true --num_workers 0 …

Numbers mean nothing there: cuDNN's attention, which plans on a device, is off, and evaluations report 1 nat.
"""

import sys

import torch

from raytrain_gpt.cli import main
from raytrain_gpt.evaluate import evaluation

METRICS = {"val/loss": 1.0, "val/perplexity": 2.7, "val/bits_per_byte": 1.0}

if __name__ == "__main__":
    torch.backends.cuda.enable_cudnn_sdp(False)
    evaluation.loss_metrics = lambda sums: dict(METRICS)
    sys.exit(main())
