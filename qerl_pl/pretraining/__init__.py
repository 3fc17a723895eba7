"""Make a small policy from scratch: tokenizer, random weights, supervised training on generated problems,
measurements."""
