"""Files of tokenizers that resemble those of released models, trained here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from raytrain_gpt.data.library_tokenizer import KNOWN_SPLITS
from tests.data.shard_tools import TEXTS, made_text

LETTERS = (
    "Да здравствует слово. 統一碼と日本語。 שלום עולם. Ένα δύο τρία. naïve café déjà 12345 " * 20
)
SOURCES = [made_text(30_000), Path(__file__).read_text(), LETTERS, *TEXTS.values()]
FAMILIES = ("gpt2", "smollm2", "llama2", "llama3", "qwen2.5", "qwen3", "mistral")
EOTS = {"llama2": "</s>", "mistral": "</s>", "llama3": "<|end_of_text|>"}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\r\n{% endfor %}"
_TRAINED: dict[str, dict[str, str]] = {}


def family(name: str) -> dict[str, str]:
    """Return name -> content of the tokenizer files of a model of this family."""
    if name not in _TRAINED:
        tokenizer = _bytes_like(name) if name not in ("llama2", "mistral") else _characters(name)
        config = {
            "tokenizer_class": "LlamaTokenizer" if name == "llama2" else "GPT2Tokenizer",
            "eos_token": EOTS.get(name, "<|endoftext|>"),
            "pad_token": EOTS.get(name, "<|endoftext|>"),
            "chat_template": TEMPLATE,
            "model_max_length": 131072,
        }
        text = json.dumps(json.loads(tokenizer.to_str()), indent=1, ensure_ascii=False)
        files = {"tokenizer.json": text, "tokenizer_config.json": json.dumps(config)}
        _TRAINED[name] = files
    return _TRAINED[name]


def write_family(name: str, place: Path, **changes: Any) -> Tokenizer:
    """Write the files of a family, with changes to its tokenizer.json; return it as the library loads it."""
    place.mkdir(parents=True, exist_ok=True)
    for file, text in family(name).items():
        (place / file).write_text(text, "utf-8")
    if changes:
        content = json.loads(family(name)["tokenizer.json"])
        (place / "tokenizer.json").write_text(json.dumps(content | changes), "utf-8")
    return read_library(place)


def read_library(place: Path) -> Tokenizer:
    """Load a directory's tokenizer with the library; special tokens in a text are text."""
    loaded = Tokenizer.from_file(str(place / "tokenizer.json"))
    loaded.encode_special_tokens = True
    return loaded


def _trainer(special: list[str], size: int = 1500, **options: Any) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, show_progress=False, **options
    )


def _bytes_like(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name == "smollm2":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    else:
        known = KNOWN_SPLITS[2 if name == "llama3" else 3]
        split = pre_tokenizers.Split(Regex(known.pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    if name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if name == "smollm2" else []
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SOURCES, _trainer(special, initial_alphabet=alphabet))
    if name == "llama3":
        tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
        begin = tokenizer.token_to_id("<|begin_of_text|>")
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(
                    "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
                ),
            ]
        )
    elif not special:
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if name.startswith("qwen"):
        words = ["<tool_call>", "</tool_call>"] + ["<think>", "</think>"] * (name == "qwen3")
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def _characters(name: str) -> Tokenizer:
    """Return a BPE of characters that falls back to bytes, as SentencePiece's are converted."""
    special, by_bytes = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.train_from_iterator(SOURCES, _trainer(special + by_bytes, 2000))
    model = json.loads(pieces.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if name == "llama2":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", model["vocab"]["<s>"])]
    )
    tokenizer.add_special_tokens(special)
    return tokenizer


def nasty_texts() -> Iterator[str]:
    """Yield about 300 texts that tokenizers read differently."""
    parts = [
        *" \n\t1aé日😀'²Ⅷ١½ſßÅ", "\r\n", "  ", " \n ", "\u00a0", "\u3000", "\u2028", "\x00", "\x1c",
        "\x7f", "\ufeff", "e\u0301", "\u1100\u1161", "ﬁ", "\u0958", "a\u0323\u0307", "\u200d", "👩\u200d👩",
        "🏳️", "\ud800", "\ufffd", "12345", " 678", "3.14", "can't", " WE'LL", "'S", "'ſ", "don’t",
        "the model", " def", "naïve", "शक्ति", "ไทย", "統一碼と日本語", "<|endoftext|>", "<|im_end|>", "</s>",
        "<s>", "<unk>", "<|begin_of_text|>", "<0x0A>", "▁", "<tool_call>", "</tool_call>", "<think>",
        "<|im_start|>", "x" * 40, "=" * 30, " " * 17, "\n" * 5, "a&b~~c--d^e|f",
    ]  # fmt: skip
    yield from ("", *parts)
    for a in parts:
        yield from (f"a{a}b", f" {a}{a} ", f"{a}\n{a}1")
    state = 7
    for _ in range(80):
        text = ""
        for _ in range(12):
            state = state * 1103515245 % 2**31 + 12345
            text += parts[state // 65536 % len(parts)]
        yield text
