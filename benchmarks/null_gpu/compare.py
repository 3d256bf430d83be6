"""Compare what ranks called on null GPUs: compare.py NULL_LOG [--killed].

Prints a line per communicator. The exit code is 1 if ranks called different collectives, a send had no
receive, a context was on a device that is not its process's, or a call would have failed or hung on a GPU.
"""

import argparse
import itertools
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

POINT_TO_POINT = re.compile(r"nccl(Send|Recv) (\d+ type \d+) op/root (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--killed", action="store_true", help="ranks may have ended at any call")
    args = parser.parse_args()
    calls: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    devices, contexts = defaultdict(set), defaultdict(set)
    problems: list[str] = []
    for file in sorted(args.log.glob("*.log")):
        for line in file.read_text(errors="replace").splitlines():
            match line.split("\t"):
                case _, _, "CALL", group, rank, _, what:
                    calls[group][int(rank)].append(what)
                case _, _, "INIT", group, rank, device, _:
                    calls[group][int(rank.split()[1])] += []
                    devices[file.stem].add(device)
                case _, _, "CONTEXT", device:
                    contexts[file.stem].add(device.rpartition(" physical")[0])
                case _, _, "VIOLATION" | "BLOCKED", _:
                    problems.append(line)
    for group, ranks in calls.items():
        ours = {
            rank: [what for what in called if not POINT_TO_POINT.match(what)]
            for rank, called in ranks.items()
        }
        for number, whats in enumerate(itertools.zip_longest(*ours.values())):
            named = {*whats} - ({None} if args.killed else set())
            if len(named) > 1:
                problems.append(f"{group}: call {number} is {dict(zip(ours, whats, strict=True))}")
                break
        pairs = defaultdict(lambda: {"Send": [], "Recv": []})
        for rank, called in ranks.items():
            for kind, what, peer in (m.groups() for m in map(POINT_TO_POINT.match, called) if m):
                pair = (rank, int(peer)) if kind == "Send" else (int(peer), rank)
                pairs[pair][kind].append(what)
        unmatched = [pair for pair, both in pairs.items() if both["Send"] != both["Recv"]]
        if unmatched and not args.killed:
            problems.append(f"{group}: sends and receives differ between ranks {unmatched}")
        kinds = dict(Counter(what.split()[0] for what in max(ranks.values(), key=len)))
        print(f"{group}: ranks {sorted(ranks)}, calls {kinds}")
    for process, found in contexts.items():
        if len(found) > 1 or found != devices.get(process, found):
            problems.append(f"{process}: contexts on {found}, communicators on {devices[process]}")
    print(
        "\n".join(problems) or f"{len(contexts)} processes with a context, each on its own device"
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
