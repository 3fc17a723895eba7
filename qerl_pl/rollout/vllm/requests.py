"""Build vLLM's requests for sampling and scoring, and read their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qerl_pl.common.types import Completion
from qerl_pl.rollout.base import Sampling

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

COOLEST, HOTTEST = 0.01, 2.0  # vLLM replaces temperatures below COOLEST by COOLEST, and refuses those above HOTTEST


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that vLLM does not support. vLLM itself would silently raise a temperature
    that is too low."""
    if temperature != 0 and not COOLEST <= temperature <= HOTTEST:
        raise ValueError(f"temperature is {temperature}; vLLM samples at 0 or {COOLEST} to {HOTTEST}")


def sampling_params(sampling: Sampling, seeds: Iterable[int], end_tokens: list[int]) -> list[SamplingParams]:
    """Build the parameters of one sampling request per seed. The requests return the log-probabilities of the sampled
    tokens only."""
    from vllm import SamplingParams

    return [
        SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            stop_token_ids=end_tokens,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # the text in which vLLM searches stop strings must include special tokens
            logprobs=0,
            detokenize=bool(sampling.stop),
        )
        for seed in seeds
    ]


def results(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    lora: LoRARequest | None,
    *,
    on_cpu: bool,
    bar: Callable[..., Any] | None = None,
) -> list[RequestOutput]:
    """Clear vLLM's prefix cache, run one request per prompt, with the adapter ``lora`` unless it is None, and return
    the results in order. ``bar`` is vLLM's argument ``use_tqdm``; None: there is no progress bar. Raises RuntimeError
    if requests of an earlier call are still queued."""
    from vllm.inputs import TokensPrompt

    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not clear its prefix cache: requests of an earlier call are still queued")
    inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    # On a CPU compilation is turned off: only a function of vLLM's sampler would be compiled, which takes 20 s, needs a
    # C++ compiler and gains no speed.
    compilation = torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()
    try:
        with compilation:
            return llm.generate(inputs, params, use_tqdm=bar or False, lora_request=lora)
    except BaseException:
        # The requests of the failed call are removed from vLLM's queue, because the next call would wait for them
        # forever.
        llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)
        raise


def completion(
    output: RequestOutput, logprobs: Sequence[float], routes: Tensor | None = None, seed: int | None = None
) -> Completion:
    """Build a completion from the result of a sampling request, the log-probabilities of its tokens in nats, and its
    ``routes`` [tokens, L, k] int16 (``Completion.routes``). ``seed`` is None if vLLM's sampling noise is not a hash of
    the request's seed, so that ``policy.margins`` cannot compute it again.
    """
    [sampled] = output.outputs
    tokens = tuple(sampled.token_ids)
    if isinstance(sampled.stop_reason, str):  # vLLM may have sampled one more token after the stop string
        logprobs = logprobs[: len(tokens)]
        routes = routes if routes is None else routes[: len(output.prompt_token_ids or ()) + len(tokens) - 1]
    assert len(tokens) == len(logprobs), (len(tokens), len(logprobs))
    return Completion(tokens, tuple(logprobs), sampled.finish_reason == "stop", seed=seed, routes=routes)


def scoring_params(last_tokens: Iterable[int]) -> list[SamplingParams]:
    """Build vLLM's parameters of the requests that compute the log-probabilities of given sequences, one per sequence.
    The prompt of a request is all tokens of its sequence but the last, whose id is in ``last_tokens``."""
    from vllm import SamplingParams

    return [
        SamplingParams(
            max_tokens=1,
            temperature=0,
            prompt_logprobs=0,
            logprob_token_ids=[token],
            flat_logprobs=True,
            detokenize=False,
        )
        for token in last_tokens
    ]


def scores(output: RequestOutput) -> list[float]:
    """Return the log-probabilities, in nats, of all tokens but the first of a scored sequence."""
    from vllm.logprobs import FlatLogprobs

    of_prompt, following = output.prompt_logprobs, output.outputs[0].logprobs
    assert isinstance(of_prompt, FlatLogprobs)
    assert isinstance(following, FlatLogprobs)
    return [*of_prompt.logprobs, following.logprobs[-1]]
