"""A small base and its policy, for tests of the update."""

import pytest
import torch

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.policy.teacher import Teacher
from qerl_pl.tools.tiny import make_tiny


@pytest.fixture
def policy(base: str) -> Policy:
    """Load a policy with an untrained adapter, so that it computes what its base computes."""
    return load_policy(base, dtype=torch.float32, lora=LoraSettings(rank=4, alpha=8), seed=0)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    """Make another model with the same tokens as the policy."""
    folder = tmp_path_factory.mktemp("objective") / "teacher"
    make_tiny(folder, seed=1, sft_steps=0)
    return Teacher(str(folder), dtype=torch.float32, device="cpu")
