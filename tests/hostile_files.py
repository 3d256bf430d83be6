"""Read checkpoints and datasets that name code in many ways, under an audit hook: nothing of it may run.

`python -m tests.hostile_files DIRECTORY` prints one JSON object: files read and refused, and every
import, exec, compile, unpickling or process that reading caused. It is a process of its own, as an audit hook
cannot be removed.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from raytrain_gpt.checkpoint.catalog import Catalog, read_checkpoint
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.data.mixture import read_mixture
from raytrain_gpt.data.verify import check_shards, check_tokenizer
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.runs.listing import describe_checkpoints, describe_run, describe_runs, write_page
from raytrain_gpt.storage.location import Location
from tests.checkpoints import write_checkpoint
from tests.data.shard_tools import prepare_here

NUM_FILES = 60
WATCHED = (
    "import",
    "exec",
    "compile",
    "pickle.find_class",
    "marshal.loads",
    "os.system",
    "os.exec",
)
WATCHED += ("subprocess.Popen", "ctypes.dlopen", "code.__new__", "builtins.input")

Reader = Callable[[Path], object]


def payloads(evil: Path) -> list[Any]:
    """Values that name the file `evil`, its module, or functions of the standard library."""
    module, file = evil.stem, str(evil)
    call = f"__import__({module!r})"
    return [
        file, module, f"{module}:main", f"{module}.main", "os:system", "raytrain_gpt.core.gpt2:GPT2", call,
        f"{{{{ {call} }}}}", f"$(python {file})", f"eval({call!r})", f"--code {file}", f"--code={file}",
        {"_target_": f"{module}.main"}, {"py/reduce": [{"py/function": "os.system"}, {"py/tuple": [file]}]},
        {"expression": call}, {"grid": [call, file]}, {"code": file}, [file], evil.read_text(),
    ]  # fmt: skip


KEYS = ("_target_", "code", "--code", "imports", "trust_remote_code", "auto_map", "architecture", "optimizer",
        "schedule", "evaluations", "trackers", "_code", "code_sha256", "tokenizer", "__reduce__",
        "settings", "implementation", "init_from", "sample_prompt")  # fmt: skip


def planted(tree: Any, values: list[Any], draw: random.Random) -> Any:
    """Copy a tree with one to three of its values or keys replaced, or keys added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        holder = tree
        while isinstance(holder, dict) and holder:
            key = draw.choice([*holder])
            if isinstance(holder[key], dict) and holder[key] and draw.random() < 0.8:
                holder = holder[key]
                continue
            value = copy.deepcopy(draw.choice(values))
            match draw.randrange(3):
                case 0:
                    holder[key] = value
                case 1:
                    holder[draw.choice(KEYS)] = value
                case 2:
                    holder[str(value)[:60]] = holder.pop(key)
            break
    return tree


def rehashed(directory: Path) -> None:
    """Make a changed checkpoint complete again: its hashes list all of its files as they are."""
    files = sorted(p for p in directory.iterdir() if p.name != "hashes.json")
    hashes = {
        f.name: {"bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in files
    }
    (directory / "hashes.json").write_text(json.dumps(hashes))


class Makers:
    """Writes hostile files of each kind, and reads them as the commands do."""

    def __init__(self, directory: Path, evil: Path) -> None:
        self.evil, self.values = evil, payloads(evil)
        self.run = directory / "run"
        self.checkpoint = write_checkpoint(self.run, 10, 1.5)
        self.data = directory / "data"
        source = directory / "text.txt"
        source.write_text("some words of a text\n" * 2000)
        prepare_here([str(source)], self.data, "bytes", val_fraction=0.1)

    def write_checkpoint(self, place: Path, draw: random.Random) -> Reader:
        """A run with one checkpoint whose `code.py` is evil, listed with its hash or not."""
        directory = place / "checkpoints" / self.checkpoint.name
        shutil.copytree(self.checkpoint, directory)
        text = self.evil.read_text()
        for name in draw.sample(
            ("code.py", "model.py", "modeling.py", "__init__.py", "evil.pth"), 2
        ):
            (directory / name).write_text(text)
        (directory / "code.py").write_text(text)
        file = directory / draw.choice(("state.json", "tokenizer.json", "rows.jsonl"))
        content = json.loads(file.read_text()) if file.exists() and file.suffix == ".json" else {}
        if file.name == "state.json":
            content["code_sha256"] = hashlib.sha256(text.encode()).hexdigest()
            selector, name = draw.choice(
                (("model", "architecture"), ("optim", "optimizer"), ("optim", "schedule"))
            )
            if draw.random() < 0.5:
                content["config"][selector][name] = draw.choice((self.evil.stem, "evil", "lion"))
        file.write_text(json.dumps(planted(content, self.values, draw)) + "\n")
        if draw.random() < 0.9:
            rehashed(directory)
        (place / "code.py").write_text(text)

        def read(place: Path) -> None:
            silent, run_dir = (lambda line: None), Location.of(place)
            describe_runs(str(place.parent), silent)
            for show in (
                describe_run,
                describe_checkpoints,
                lambda one, say: write_page([one], say),
            ):
                with contextlib.suppress(RaytrainGptError):
                    json.dumps(show(run_dir, silent), default=str)
            Catalog(Location.of(place)).pick("newest", lambda line: None)
            read_checkpoint(Location.of(directory)).verify()
            open_checkpoint(place)

        return read

    def write_dataset(self, place: Path, draw: random.Random) -> Reader:
        shutil.copytree(self.data, place)
        file = place / draw.choice(("manifest.json", "tokenizer.json"))
        file.write_text(json.dumps(planted(json.loads(file.read_text()), self.values, draw)))
        (place / "code.py").write_text(self.evil.read_text())

        def read(place: Path) -> None:
            for part in read_mixture([(Location.of(place), Fraction(1))]).datasets:
                check_tokenizer(part.directory, part.manifest)
                check_shards(part.directory, part.manifest, True)

        return read


def main(directory: Path) -> None:
    evil = directory / "evil_code.py"
    marker = directory / "ran"
    evil.write_text(
        "from raytrain_gpt.extend import optimizer\n"
        f"open({str(marker)!r}, 'a').write('ran')\n"
        "def main(*args, **kwargs): pass\n"
    )
    sys.path.insert(0, str(directory))
    makers = Makers(directory, evil)
    writers = [makers.write_checkpoint, makers.write_dataset]
    events: list[str] = []
    watching = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and event in WATCHED:
            frame, files = sys._getframe(1), []
            while frame is not None:
                files.append(Path(frame.f_code.co_filename).name)
                frame = frame.f_back  # type: ignore[assignment]
            events.append(f"{event} {str(args)[:200]} in {files[:6]}")

    sys.addaudithook(hook)
    outcomes: Counter[str] = Counter()
    for number in range(-10, NUM_FILES):  # the first ones load what is imported on use
        draw = random.Random(number)
        place = directory / f"file{number % 2}-{number}"
        read = writers[number % len(writers)](place, draw)
        watching = number >= 0
        try:
            read(place)
            outcome = "read"
        except RaytrainGptError:
            outcome = "refused"
        watching = False
        if number >= 0:
            outcomes[outcome] += 1
        shutil.rmtree(place)
    loaded = sorted(name for name in sys.modules if "evil" in name or "raytrain_gpt_code" in name)
    result = {**outcomes, "events": [*events], "loaded": loaded, "ran": marker.exists()}
    events.clear()
    watching = True
    # Only this executes it: the hook and the marker must notice.
    Registry(Code.read(evil)).user_kinds()
    watching = False
    seen = sorted({event.split()[0] for event in events})
    print(json.dumps({**result, "seen_if_executed": seen, "ran_if_executed": marker.exists()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
