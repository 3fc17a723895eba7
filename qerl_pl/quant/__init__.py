"""The frozen quantised base: formats, the linear, loading, the offline quantiser."""
