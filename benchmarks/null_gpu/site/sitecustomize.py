"""Replace the numbers without which the product would stop on a GPU that computes nothing."""

import importlib.machinery
import os
import sys

METRICS = {"val/loss": 1.0, "val/perplexity": 2.7, "val/bits_per_byte": 1.0}


def _torch(module):
    module.backends.cuda.enable_cudnn_sdp(False)  # it plans on a device


def _evaluation(module):
    module.loss_metrics = lambda sums: dict(METRICS)


def _tokenizer(module):
    module.Tokenizer.decode = lambda self, tokens: f"{len([*tokens])} tokens"


def _state(module):
    real = module.has_finite_parameters
    module.has_finite_parameters = lambda model: real(model) or True


def _probe(module):
    real = module._wrong_sums
    module._wrong_sums = lambda use_gpu: real(use_gpu) and 0


PATCHES = {
    "torch": _torch,
    "raytrain_gpt.evaluate.evaluation": _evaluation,
    "raytrain_gpt.core.state": _state,
    "raytrain_gpt.data.tokenizer": _tokenizer,
    "raytrain_gpt.train.probe": _probe,
}


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        PATCHES[module.__name__](module)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in PATCHES else None
        if spec is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


if os.environ.get("NULL_GPU"):
    sys.meta_path.insert(0, _Finder)
