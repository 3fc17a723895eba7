"""The code blocks on the documentation page about use from Python form one program. It runs as it is printed there."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import ROOT

PAGE = ROOT / "docs" / "library.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers", "ignore:The PEFT config")
def test_the_blocks_train_a_policy_read_its_curves_and_speak_to_it(bases, tmp_path, monkeypatch, capsys):
    shutil.copytree(bases["nvfp4"], tmp_path / "models" / "tiny-0-nvfp4")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks[:-1]:
        exec(block, names)
    assert names["trainer"].global_step == 3
    assert names["curves"]["train/reward"].steps == [0, 1, 2]
    assert names["trained"].logprobs.sum() < 0
    assert Path("runs/library/checkpoints/last.ckpt").exists()
    with pytest.raises(SystemExit, match="0"):  # the last block prints the configuration and trains nothing
        exec(blocks[-1], names)
    printed = capsys.readouterr().out
    assert "rollout 3 of 3: reward" in printed
    assert "max_steps: 1" in printed
