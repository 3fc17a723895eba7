"""A run on several ranks does what a run on one rank does: the same rollouts, the same steps, and the same files."""

import json
import os
import signal
from typing import Any

import pytest
import torch

from qerl_pl.base.digest import base_digest
from qerl_pl.results.curves import read_curves
from tests.integration.conftest import VLLM, arguments, launch, load_last
from tests.program import Program
from tests.two_ranks import free_port

TWO_RANKS = ("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp")
QUANTISED = ("--model.quantize", "nvfp4")
NOT_EQUAL = ("time/", "throughput/", "memory/", "epoch", "ledger/")  # the ledger looks at some rows of each rank


def finish(process: Program, *, status: int = 0) -> str:
    """Wait for a process, check its exit status, and return what it printed."""
    output, _ = process.communicate()
    assert process.returncode == status, output
    return output


def start_node(launcher: str, node: int, port: int, args: list[str]) -> Program:
    """Start the process of one of two nodes, with the environment variables that torchrun or SLURM (``launcher``) would
    set on this node. Both nodes are really this machine."""
    if launcher == "torchrun":
        ranks = {"RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": node}
        variables = {name: str(value) for name, value in (ranks | {"MASTER_PORT": port}).items()}
        elastic = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
        return Program(args, environment=os.environ | variables | elastic)
    job = {"JOB_NAME": "test", "JOB_ID": 1, "NODELIST": "localhost", "NNODES": 2, "NTASKS": 2}
    task = {"NTASKS_PER_NODE": 1, "PROCID": node, "NODEID": node, "LOCALID": 0}
    variables = {f"SLURM_{name}": str(value) for name, value in (job | task).items()} | {"MASTER_PORT": str(port)}
    return Program(args, environment=os.environ | variables)


def launch_two(*args: Any) -> Program:
    """Start the program with two ranks on a CPU."""
    return launch(*args, *TWO_RANKS, environment=os.environ | {"MASTER_PORT": str(free_port())})


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_begun_on_two_ranks_and_ended_on_one_is_the_run_of_one(bases, run, tmp_path):
    ctrl_c = ("--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=2")
    short = ("--model.sampling.max_tokens", "1", "--model.sampling.num_completions", "2")  # groups are often equal
    refills = ("--model.dynamic_sampling.max_refills", "4", "--model.dynamic_sampling.oversample", "1.5")
    steps = ("--trainer.max_steps", "5", *VLLM, *short, *refills, "--model.dynamic_sampling.metric", "low_tokens")
    begun = launch_two("fit", bases["nvfp4"], tmp_path / "two", *steps, *ctrl_c)
    run("fit", tmp_path / "one", *steps)
    assert "resume with --ckpt_path last" in finish(begun, status=128 + signal.SIGINT)
    assert load_last(tmp_path / "two")["global_step"] == 3
    run("fit", tmp_path / "two", *steps, "--ckpt_path", "last")

    for path in sorted((tmp_path / "one" / "completions").glob("*.jsonl")):
        assert path.read_text() == (tmp_path / "two" / "completions" / path.name).read_text(), path.name
    one, two = load_last(tmp_path / "one"), load_last(tmp_path / "two")
    assert one["global_step"] == two["global_step"] == 5
    torch.testing.assert_close(two["state_dict"], one["state_dict"], rtol=1e-3, atol=1e-5)
    curves, others = read_curves(tmp_path / "one"), read_curves(tmp_path / "two")
    assert curves.keys() == others.keys()
    for tag in curves.keys() - {tag for tag in curves if tag.startswith(NOT_EQUAL)}:
        assert others[tag].steps == curves[tag].steps, tag
        assert others[tag].values == pytest.approx(curves[tag].values, rel=1e-3, abs=1e-5), tag
    assert min(curves["train/grad_norm"].values) > 0, "nothing was learned"
    assert max(curves["rollout/refills"].values) > 0
    assert max(curves["rollout/groups_discarded"].values) > 0


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("slurm", marks=pytest.mark.long)])
def test_two_nodes_score_every_problem_once_and_print_one_table(bases, run, tmp_path, launcher):
    problems = ("--data.source.init_args.num_validation", "7", "--data.val_batch_size", "2")  # 4 and 3, 2 batches each
    port, base = free_port(), bases["nvfp4"]
    two = ("--trainer.accelerator", "cpu", "--trainer.num_nodes", "2")
    args = arguments("validate", base, tmp_path / "two", *problems, *two)
    nodes = [start_node(launcher, node, port, args) for node in range(2)]
    outputs = [finish(node) for node in nodes]
    assert sum("7 problems x 1" in output for output in outputs) == 1
    run("validate", tmp_path / "one", *problems)
    for name in ("evaluation/validate.json", "completions/validate-000000.jsonl"):
        one, two = (tmp_path / ranks / "validate" / "arithmetic" / name for ranks in ("one", "two"))
        assert one.read_text() == two.read_text()
    assert json.loads(one.parent.parent.joinpath("evaluation", "validate.json").read_text())["num_problems"] == 7


@pytest.mark.slow
def test_ranks_quantise_once_draw_noise_on_their_own_and_an_error_on_one_ends_the_other(bases, tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    often_equal = ("--model.sampling.max_tokens", "1", "--model.sampling.num_completions", "2")
    refills = (*often_equal, "--model.dynamic_sampling.max_refills", "3", "--trainer.callbacks.per_rank=true")
    fails = ("--trainer.callbacks+=tests.integration.toy.Fails", "--trainer.callbacks.rank=0")
    process = launch_two("fit", bases["dense"], tmp_path, *refills, *fails, "--trainer.callbacks.at=4", *QUANTISED)
    output, _ = process.communicate()  # ends when both ranks have
    assert process.returncode != 0
    assert "rank 0 fails at 4" in output
    last = load_last(tmp_path)
    assert last["global_step"] == 3, "the fourth step was over but not yet on record"
    [made] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert made.name.startswith("dense-nvfp4-"), "and nothing half-written beside it"
    assert last["identity"]["base"] == base_digest(bases["nvfp4"]), "the base that `quantize` writes"
    curves = read_curves(tmp_path)
    assert max(curves["rollout/refills"].values) >= 1
    assert curves["aqn/noisy_norms"].values == [0, 0, 4, 4], "the canary compares each engine with its own rank's noise"
