"""Seeds as a function of what they are for, so that nothing random needs to be saved."""

import hashlib


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """A seed in [0, 2^63) for one use: equal arguments give equal seeds on every machine and Python version.

    Args:
        seed: the run's seed.
        purpose: what is drawn, e.g. ``"rollout"`` or ``"aqn"``; different purposes give unrelated streams.
        index: which one of them, e.g. the rollout index.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
