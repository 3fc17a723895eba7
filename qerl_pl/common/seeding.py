"""Seeds computed from the run's seed, a purpose and an index, so that a resumed run needs no saved random state."""

import hashlib


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """Derive a seed in [0, 2^63) from the run's seed, a purpose, such as "rollout", and an index. Seeds of different
    purposes are unrelated. Equal arguments give equal seeds on every machine and Python version."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
