"""A run on several ranks does what a run on one rank does: the same rollouts, the same steps, and the same files."""

import json
import os
import re
import signal

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


def start_both(launcher: str, args: list[str], *, num_nodes: int) -> list[Program]:
    """Start the processes of two ranks, with the environment variables that torchrun or SLURM (``launcher``) would set
    for ranks on one node or on two. Both nodes are really this machine."""
    port, one_node = free_port(), num_nodes == 1
    programs = []
    for rank in range(2):
        node, local_rank = (0, rank) if one_node else (rank, 0)
        if launcher == "torchrun":
            values = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1 + one_node}
            values |= {"GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
        else:
            job = {"JOB_NAME": "test", "JOB_ID": 1, "NODELIST": "localhost", "NNODES": num_nodes, "NTASKS": 2}
            task = {"NTASKS_PER_NODE": 1 + one_node, "PROCID": rank, "NODEID": node, "LOCALID": local_rank}
            values = {f"SLURM_{name}": value for name, value in (job | task).items()}
        variables = {name: str(value) for name, value in values.items()} | {"MASTER_PORT": str(port)}
        programs.append(Program(args, environment=os.environ | variables | {"OMP_NUM_THREADS": "1"}))
    return programs


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_begun_on_two_ranks_and_ended_on_one_is_the_run_of_one(bases, run, tmp_path):
    ctrl_c = ("--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=2")
    short = ("--model.sampling.max_tokens", "1", "--model.sampling.num_completions", "2")  # groups are often equal
    refills = ("--model.dynamic_sampling.max_refills", "4", "--model.dynamic_sampling.oversample", "1.5")
    steps = ("--trainer.max_steps", "5", *VLLM, *short, *refills, "--model.dynamic_sampling.metric", "low_tokens")
    args = arguments("fit", bases["nvfp4"], tmp_path / "two", *steps, *ctrl_c, *TWO_RANKS)
    begun = start_both("torchrun", args, num_nodes=1)
    run("fit", tmp_path / "one", *steps)
    first, _ = [finish(rank, status=128 + signal.SIGINT) for rank in begun]
    assert "resume with --ckpt_path last" in first
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
    printed = re.findall(r"rollout \d of 5: reward (\S+),", first)
    assert printed == [f"{value:.3f}" for value in others["train/reward"].values[:3]]
    files = [tmp_path / "two" / "completions" / f"train-{step:06d}.jsonl" for step in range(3)]
    assert f" of {sum(path.read_text().count(chr(10)) for path in files) // 2} groups had one" in first


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("slurm", marks=pytest.mark.long)])
def test_two_nodes_score_every_problem_once_and_print_one_table(bases, run, tmp_path, launcher):
    problems = ("--data.source.init_args.num_validation", "7", "--data.val_batch_size", "2")  # 4 and 3, 2 batches each
    two = ("--trainer.accelerator", "cpu", "--trainer.num_nodes", "2")
    args = arguments("validate", bases["nvfp4"], tmp_path / "two", *problems, *two)
    outputs = [finish(rank) for rank in start_both(launcher, args, num_nodes=2)]
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
    settings = (*refills, *fails, "--trainer.callbacks.at=4", *QUANTISED, *TWO_RANKS)
    environment = os.environ | {"MASTER_PORT": str(free_port())}
    process = launch("fit", bases["dense"], tmp_path, *settings, environment=environment)  # which starts the other rank
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
