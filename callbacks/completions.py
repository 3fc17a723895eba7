"""Write the sampled completions to JSON Lines files, and some of them to the loggers, so that people can read them."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.checks import require_at_least
from qerl_pl.common.files import write_whole
from qerl_pl.common.loggers import log_completions
from qerl_pl.common.types import Experience
from qerl_pl.module import QeRLModule
from qerl_pl.rollout.loop import Rollout
from qerl_pl.rollout.token_file import RowTokens, write_tokens
from qerl_pl.update import UpdateReport


class CompletionLogger(Callback):
    """Writes every completion to ``run_dir/completions/*.jsonl`` and a few of them to the loggers.

    Each rollout (``train-000012.jsonl``), validation (``validate-000040.jsonl``), test and prediction run has a file,
    with the completions of all ranks in the order of the prompts. A file is written as a whole, so a resumed run
    replaces the files of repeated rollouts and duplicates no lines.

    Args:
        every: number N; the completions of rollouts 0, N, 2 N, ... are written, and those of validation, test and
            prediction always.
        num_text: number of completions of each file that are also sent to TensorBoard (a text), Weights & Biases (a
            table) and MLflow (a file).
        tokens_every: one in this many of the written rollouts also gets a file ``train-000010.safetensors`` with values
            of each token, which ``python -m qerl_pl report --html`` shows: its log-probability, the entropy, the
            difference between the log-probabilities of trainer and sampler and, with a teacher, between those of
            teacher and trainer. It has ten or twelve bytes per token, and no values of completions that dynamic
            sampling dropped. 0: no such files.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.completions.CompletionLogger
              init_args: {every: 5, tokens_every: 10}
    """

    def __init__(self, every: int = 1, num_text: int = 4, tokens_every: int = 10) -> None:
        require_at_least(1, every=every, hint=" (leave the callback out to write nothing)")
        require_at_least(0, num_text=num_text, tokens_every=tokens_every, hint=" (0 writes none)")
        self.every, self.num_text, self.tokens_every = every, num_text, tokens_every

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        index = outputs["rollout_index"]
        path = _path(trainer, f"train-{index:06d}.jsonl")
        of_tokens, of_validation = path.with_suffix(".safetensors"), _path(trainer, f"validate-{index + 1:06d}.jsonl")
        is_due = index % self.every == 0
        has_tokens = is_due and self.tokens_every and index // self.every % self.tokens_every == 0
        if trainer.is_global_zero:
            for stale in (path, of_tokens, of_validation):  # of an earlier start, which may have had other intervals
                stale.unlink(missing_ok=True)
        if has_tokens:
            _write_tokens(trainer, pl_module, of_tokens, outputs["rollout"], outputs["update"])
        if is_due:
            rows = ranks.gather_groups(outputs["rollout"].sampled.rows(), pl_module.sampling.num_completions)
            self._write(trainer, path, rows, "completions/train", index)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        command, rows = str(trainer.state.fn and trainer.state.fn.value), pl_module.evaluated
        stage = "validate" if command == "fit" else command
        path = _path(trainer, f"{stage}-{pl_module.rollout_index:06d}.jsonl")
        step = max(0, pl_module.rollout_index - 1)  # the step under which the scalars of this evaluation are logged
        self._write(trainer, path, rows, f"completions/{stage}", step)
        if trainer.is_global_zero and command != "fit":
            print(f"{len(rows)} completions written to {path}")

    on_test_end = on_predict_end = on_validation_end  # pyright: ignore[reportAssignmentType]

    def _write(self, trainer: Trainer, path: Path, rows: list[dict[str, Any]], tag: str, step: int) -> None:
        if not trainer.is_global_zero:
            return
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        if rows and self.num_text:
            chosen = rows[:: max(1, len(rows) // self.num_text)][: self.num_text]
            log_completions(trainer.loggers, tag, chosen, step=step)


def _path(trainer: Trainer, name: str) -> Path:
    return Path(trainer.default_root_dir) / "completions" / name


def _write_tokens(trainer: Trainer, pl_module: QeRLModule, path: Path, rollout: Rollout, update: UpdateReport) -> None:
    size = pl_module.sampling.num_completions
    tokens = rows_of(update)
    if pl_module.settings.dynamic_sampling is None:
        tokens = ranks.gather_groups(tokens, size)
    else:
        tokens = _as_sampled(rollout, tokens, size)
    if trainer.is_global_zero:
        path.parent.mkdir(parents=True, exist_ok=True)
        occurring = torch.cat([row.ids for row in tokens]).unique().tolist()
        texts = pl_module.loop.tokenizer.batch_decode([[token] for token in occurring])
        write_tokens(path, tokens, dict(zip(occurring, texts, strict=True)))


def _as_sampled(rollout: Rollout, tokens: list[RowTokens], size: int) -> list[RowTokens]:
    """Gather the values of tokens from all ranks, and return them in the order in which the completions of the rollout
    were sampled, ``size`` for each prompt. Completions that dynamic sampling dropped have no tokens. ``tokens`` are
    those of the completions that this rank trains on."""
    both = rollout.sampled, rollout.chosen
    sampled, chosen = ([(prompt.tokens, prompt.copy) for prompt in batch.prompts[::size]] for batch in both)
    known: dict[Any, list[RowTokens]] = {}
    for groups in ranks.gather_values({key: tokens[i * size : (i + 1) * size] for i, key in enumerate(chosen)}):
        known |= groups
    nothing = torch.empty(0)
    has_teacher = any(row.teacher is not None for row in tokens)
    none = RowTokens(nothing.long(), nothing, nothing, nothing, 0.0, nothing if has_teacher else None)
    return [row for key in ranks.gather_groups(sampled, 1) for row in known.get(key, [none] * size)]


def rows_of(update: UpdateReport) -> list[RowTokens]:
    """Copy the sampled tokens of each completion to the CPU, with values of each token such as its log-probability (see
    ``RowTokens``)."""
    batch: Experience = move_data_to_device(update.experience, "cpu")
    logprobs, entropy = update.old_logprobs.cpu(), update.entropy.cpu()
    gap = logprobs - batch.sampler_logprobs
    teacher = None if update.teacher_logprobs is None else update.teacher_logprobs.cpu() - logprobs
    return [
        RowTokens(
            ids=batch.tokens[row, sampled],
            logprobs=logprobs[row, sampled],
            gap=gap[row, sampled],
            entropy=entropy[row, sampled],
            advantage=batch.advantages[row].item(),
            teacher=None if teacher is None else teacher[row, sampled],
        )
        for row, sampled in enumerate(batch.sampled)
    ]
