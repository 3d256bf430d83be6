"""`python train.py …` is `raytrain-gpt train …`: for checkouts and `ray job submit`."""

import sys

from raytrain_gpt.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
