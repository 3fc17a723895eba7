"""Adaptive quantization noise (AQN): its schedule over the rollouts, and adding it to norm weights."""
