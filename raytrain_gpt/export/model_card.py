"""Model card of an exported checkpoint: model, training and scores, without paths of the training machine."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import jinja2
import torch
import yaml

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.columns import own_scores
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.data.mixture import dataset_names, parse_data_path
from raytrain_gpt.data.tokenizer import MAX_NAME_LENGTH
from raytrain_gpt.export.hf_weights import mapping_of
from raytrain_gpt.format import number
from raytrain_gpt.version import VERSION

CARD_FILE = "README.md"
IMPORT_EVENT = "import"
_SECTIONS = ("model", "data", "optim", "train")
_PATHS = {"init_from", "branch_from", "data_path"}
_NOT_IN_CODE = re.compile(r"[^\w .,:;=+@%#/()-]")
_SCORES = ("val/", "hellaswag/")

Rows = list[tuple[str, str]]


def model_card(
    checkpoint: Checkpoint,
    config: Config,
    tokenizer: str,
    shape: GPTShape,
    num_parameters: int,
    dtype: str,
) -> str:
    """Render the card as Markdown with YAML front matter; `tokenizer` and `dtype` are names."""
    model = [
        ("parameters", f"{num_parameters:,}"),
        ("layers, heads, channels", f"{shape.num_layers}, {shape.num_heads}, {shape.embd_size}"),
        *((_code(name), _code(str(value))) for name, value in shape.settings.model_dump().items()),
        ("context", f"{shape.seq_len} tokens"),
        ("vocabulary", f"{shape.vocab_size} ids, tokenizer {_code(tokenizer)}"),
        ("tensors", dtype),
    ]
    imports = [row for row in checkpoint.rows() if row.get("event") == IMPORT_EVENT]
    tree = {name: getattr(config, name).model_dump(exclude=_PATHS) for name in _SECTIONS}
    template = resources.files("raytrain_gpt").joinpath("export", "model_card.md.jinja")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(template.read_text("utf-8")).render(
        name=config.run.run_name,
        architecture=shape.architecture,
        description=getattr(mapping_of(shape), "DESCRIPTION", "A language model"),
        version=VERSION,
        torch_version=torch.__version__,
        model=model,
        imported_from=_code(imports[-1]["source"]) if imports else None,
        training=_training(checkpoint, config),
        configuration=yaml.safe_dump(tree, sort_keys=False),
        scores=_scores(checkpoint),
    )


def _code(text: str) -> str:
    """Format untrusted text as Markdown code; characters that could end it or open HTML become `?`."""
    return f"`{_NOT_IN_CODE.sub('?', text[:MAX_NAME_LENGTH]) or '?'}`"


def _training(checkpoint: Checkpoint, config: Config) -> Rows:
    state = checkpoint.state
    facts = [
        ("steps", f"{state.step:,}"),
        ("tokens seen", f"{state.tokens_seen:,}"),
        ("data (hash of its manifests)", _code(state.manifest_hash)),
        ("tokenizer (hash of its vocabulary)", _code(state.vocab_hash)),
        ("order of the batches (hash)", _code(state.order_hash)),
        ("workers", f"{state.num_workers}"),
    ]
    datasets = parse_data_path(config.data.data_path)
    if len(datasets) > 1:
        weights = zip(dataset_names([path for path, _ in datasets]), datasets, strict=True)
        shares = ", ".join(f"{name} {float(weight):.1%}" for name, (_, weight) in weights)
        facts.insert(2, ("datasets, by tokens", shares))
    if state.skipped_batches:
        skipped = sum(stop - first for first, stop in state.skipped_batches)
        facts.append(("batches skipped after loss spikes", f"{skipped}"))
    if config.model.init_from is not None:
        facts.append(("initialized from", "weights of another checkpoint"))
    return facts


def _scores(checkpoint: Checkpoint) -> Rows:
    """Return the metrics that the run measured at the checkpoint's step."""
    scores: dict[str, Any] = {}
    for row in checkpoint.rows():
        if row["step"] == checkpoint.state.step:
            scores |= {key: value for key, value in row.items() if key.startswith(_SCORES)}
            scores |= own_scores(row)
    return [
        (_code(key), f"{value:,}" if isinstance(value, int) else number(value, ".4f"))
        for key, value in scores.items()
    ]
