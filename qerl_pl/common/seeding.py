"""Seeds computed from the run's seed, a purpose and an index, so that a resumed run needs no saved random state."""

import hashlib


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """Derive a seed in [0, 2^63); equal arguments give equal seeds on every machine and Python version.

    Args:
        seed: the run's seed.
        purpose: what is drawn, e.g. ``"rollout"`` or ``"aqn"``; different purposes give unrelated seeds.
        index: number of the draw for this purpose, e.g. the rollout index.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
