"""The policy that is trained: a causal language model with a frozen base and a LoRA adapter."""
