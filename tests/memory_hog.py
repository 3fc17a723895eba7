"""Take and free GPU memory in turns, like programs of other users, until killed: python -m tests.memory_hog --gib 20"""

import argparse
import random
import time
from contextlib import suppress

import torch


def main() -> None:
    """Take and free memory until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0, help="most GiB at a time")
    most = int(parser.parse_args().gib * 2**30)
    draw = random.Random(0)
    torch.zeros(1, device="cuda")
    print("started", flush=True)
    while True:
        with suppress(torch.OutOfMemoryError):  # other programs have taken what it wanted
            taken = torch.empty(draw.randrange(most // 8, most), dtype=torch.uint8, device="cuda")
            time.sleep(0.05 * draw.random())
            del taken
        torch.cuda.empty_cache()
        time.sleep(0.05 * draw.random())


if __name__ == "__main__":
    main()
