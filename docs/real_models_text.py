"""The text of docs/real_models.md and docs/real_completions.md, with places for what docs/real_models.py computes."""

TEXT = """\
# Real models: GSM8K with Qwen2.5-Coder 0.5B and 1.5B

What training does to two pretrained models, and what it costs: GRPO on GSM8K with `configs/tasks/gsm8k_verl.yaml`, the
settings of verl's published LoRA logs, and with `configs/tasks/gsm8k_boxed.yaml`, a recipe for small models on the same
budget of rollouts. `python docs/real_models.py` writes this page from the lines that benchmarks left in `docs/results`.

The models are Qwen2.5-Coder-0.5B-Instruct and Qwen2.5-Coder-1.5B-Instruct, read from GGUF files and dequantised. So
"bf16" stands for these dequantised weights and not for the published ones, and NVFP4 quantises them once more.
{models}

## What does training change?

Arms are a bf16 base, an NVFP4 base (rounded to nearest), and NVFP4 with adaptive quantization noise (AQN, with the
sigmas of the paper). All arms have the learning rate of the task. Accuracies are per cent of the 1319 test problems,
sampled greedily before the first rollout and after the last: strict asks for the answer where the prompt wants it,
lenient takes it from anywhere in the text. Cells have the mean over seeds, with the lowest and the highest in brackets.
Reward (strict, at temperature 1), entropy in nats per token and length in tokens are means of the first and of the last
ten rollouts. An alarm is a run that a check or an error ended; runs that ended early are counted under seeds ("2 of 3")
and left out of the other columns.

{curves}

## Do the arms differ?

Differences in points, of pairs with equal seeds. The first interval is over test problems: what other problems of this
kind could have given for these very runs. The second one is over seeds: what other seeds could have given on these
problems. Both are 95 % t intervals; with three seeds the second is wide, and only it says something about an arm and
not about single runs. Before training nothing depends on the seed.

{differences}

## Is there a better recipe on the same budget?

`gsm8k_boxed` minus `gsm8k_verl` after training, with the same model, arm, seeds and numbers of rollouts and
completions. Each strict accuracy is of the task's own answer format. Intervals are those above.

{recipe}

## What does a small model learn?

Shares of the test problems in per cent, means over seeds. "Place learnt" were wrong before for strict scoring and right
for lenient scoring, and are right for strict scoring afterwards: the model gave the answer, but not where the prompt
asks for it. "Answer learnt" were wrong for both before, and are right for strict scoring afterwards. "Lost" are those
that strict scoring found right before and wrong afterwards. The next two columns are about lenient scoring. Tokens are
the mean length of greedy completions, and "cut" the share that reached the limit.
[real_completions.md](real_completions.md) has completions of one run before and after.

{learnt}

## How long does TRL need for the same accuracy?

TRL's GRPOTrainer on the same model, task and kind of GPU, and runs of each arm, all alone on their GPU. With equal
seeds both read the same prompts in the same order, and completions are scored by the same code. Seconds are of
training, without start and validations. "Reward" is the highest running mean (ten rollouts, at temperature 1) that all
of them reached, and the next column the seconds until each of them first did. "strict after" is the greedy accuracy on
the test problems after the last rollout. TRL's bf16 base is the same dequantised model.

{trl}

## Which four bits?

Divergence of quantised copies from the dense policy before training, in nats per token, on completions that the dense
policy sampled for test problems at temperature 1; "+-" is a standard error. A variant is METHOD+RANK: the quantiser,
and the rank of an adapter that starts at the quantisation error. "KL - first" is the difference to the first variant,
paired by token; "same token" the share of equal most likely tokens; "strict" the greedy accuracy before training, with
answers in a box, and "- dense" its difference to the dense policy, paired by problem.

{four_bits}

## Does NVFP4 sample faster here?

Tokens per second. A table by the number of sequences has whole rollout calls alone on a GPU, of random weights with the
shapes of these models; the table by arm has the median rollout of the runs above, several of which shared a GPU.

{speeds}

## What does a run cost?

"Minutes" is a whole run with start, all rollouts and validations, with so many runs at a time on one GPU; "GPU minutes"
is that divided by their number. Seconds of a rollout, of its parts and of a validation are medians. Memory is what the
memory plan says.

{costs}

## Does a long run stay the same?

Medians over the four quarters of a run. GPU memory is what the driver reports as used since the run began, so runs next
to it count.

{long_runs}

## Do the checks stay silent?

What the checks read in healthy runs that were made for this purpose, the largest value of all rollouts. An excess above
4 stops a run, unless the difference is below 0.02 nats. `gap` is the mean difference between log-probabilities of
engine and trainer in nats, `gradient` the gradient's norm over its running median.

{checks}
"""

COMPLETIONS = """\
# Completions before and after training

Written by `python docs/real_models.py`; [real_models.md](real_models.md) has the numbers.

{about}

{completions}
"""
