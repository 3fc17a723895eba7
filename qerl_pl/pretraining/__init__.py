"""Small policies made from scratch: tokenizer, weights, supervised training on generated problems, measurement."""
