"""Check a base checkpoint before it is loaded: complete files, a digest of its bytes, and a usable tokenizer."""
