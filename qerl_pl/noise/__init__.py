"""Adaptive quantization noise: its schedule and its application to norm weights."""
