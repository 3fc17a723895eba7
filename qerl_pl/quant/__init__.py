"""Frozen quantised base: 4-bit formats, the linear layer, loading, conversion and the offline quantiser."""
