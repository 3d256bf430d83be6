"""The model card of an exported checkpoint: what it is, how it was trained, what it scores.

It names no directory of the machine that trained it.
"""

from __future__ import annotations

from typing import Any

import torch
import yaml

from raytrain_gpt import __version__
from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.data.mixture import dataset_names, parse_data_path
from raytrain_gpt.format import number

CARD_FILE = "README.md"
IMPORT_EVENT = "import"
_FRONT_MATTER = {
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
    "tags": ["gpt2", "raytrain-gpt"],
}
_SECTIONS = ("model", "data", "optim", "train")
_PLACES = ("init_from", "data_path")
_SCORES = ("val/", "hellaswag/")


def model_card(
    checkpoint: Checkpoint, config: Config, tokenizer: str, shape: GPTShape, dtype: str
) -> str:
    """The card as Markdown with YAML front matter.

    Args:
        checkpoint: What was exported.
        config: Of its run.
        tokenizer: Its name.
        shape: The model's.
        dtype: Of the exported tensors.
    """
    parameters = shape.num_parameters - shape.embd_size * (
        shape.padded_vocab_size - shape.vocab_size
    )
    facts = [
        ("parameters", f"{parameters:,}"),
        ("layers, heads, channels", f"{shape.num_layers}, {shape.num_heads}, {shape.embd_size}"),
        ("context", f"{shape.seq_len} tokens"),
        ("vocabulary", f"{shape.vocab_size} ids, tokenizer `{tokenizer}`"),
        ("tensors", dtype),
    ]
    parts = [
        f"---\n{yaml.safe_dump(_FRONT_MATTER, sort_keys=False)}---\n",
        f"# {config.run.run_name}\n",
        "A GPT-2 (learned positions, pre-LayerNorm, tanh GELU, tied embedding), exported by "
        f"raytrain-gpt {__version__}.\n",
        _table(("", ""), facts),
        "## Use\n",
        _USE,
        "## Training\n",
        *_training(checkpoint, config),
        "## Evaluation\n",
        _evaluation(checkpoint),
        "## Versions\n",
        f"Exported with raytrain-gpt {__version__} and torch {torch.__version__}.\n",
    ]
    return "\n".join(parts)


_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")  # this directory
model = AutoModelForCausalLM.from_pretrained(".")
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))
```
"""


def _table(header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |" for left, right in (header, ("---", "---"), *rows)]
    return "\n".join(lines) + "\n"


def _training(checkpoint: Checkpoint, config: Config) -> list[str]:
    state = checkpoint.state
    imported = [row for row in checkpoint.rows() if row.get("event") == IMPORT_EVENT]
    if imported:
        return [
            f"None by raytrain-gpt: the weights were imported from `{imported[-1]['source']}`.\n"
        ]
    facts = [
        ("steps", f"{state.step:,}"),
        ("tokens seen", f"{state.tokens_seen:,}"),
        *_mixed(config.data.data_path),
        ("data (hash of its manifests)", f"`{state.manifest_hash}`"),
        ("tokenizer (hash of its vocabulary)", f"`{state.vocab_hash}`"),
        ("order of the batches (hash)", f"`{state.order_hash}`"),
        ("workers", f"{state.num_workers}"),
    ]
    if state.skipped_batches:
        left_out = sum(stop - first for first, stop in state.skipped_batches)
        facts.append(("batches left out after loss spikes", f"{left_out}"))
    if config.model.init_from is not None:
        facts.append(("started from", "the weights of another checkpoint"))
    tree: dict[str, Any] = {
        section: {
            name: value
            for name, value in getattr(config, section).model_dump().items()
            if name not in _PLACES
        }
        for section in _SECTIONS
    }
    return [
        _table(("", ""), facts),
        "The configuration of the run:\n",
        f"```yaml\n{yaml.safe_dump(tree, sort_keys=False)}```\n",
    ]


def _mixed(data_path: str) -> list[tuple[str, str]]:
    """Names and weights of several datasets."""
    parts = parse_data_path(data_path)
    if len(parts) == 1:
        return []
    names = dataset_names([path for path, _ in parts])
    shares = zip(names, (weight for _, weight in parts), strict=True)
    return [("datasets, by tokens", ", ".join(f"{name} {float(w):.1%}" for name, w in shares))]


def _evaluation(checkpoint: Checkpoint) -> str:
    """The scores of the checkpoint's own step, as its run found them."""
    scores: dict[str, Any] = {}
    for row in checkpoint.rows():
        if row["step"] == checkpoint.state.step:
            scores |= {key: value for key, value in row.items() if key.startswith(_SCORES)}
    if not scores:
        return "None at this step.\n"
    rows = [
        (f"`{key}`", f"{value:,}" if isinstance(value, int) else number(value, ".4f"))
        for key, value in scores.items()
    ]
    meaning = "`val/loss` is in nats a token, on validation splits; of several datasets the mean by weight.\n"
    return f"{_table(('metric', 'value'), rows)}\n{meaning}"
