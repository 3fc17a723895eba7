"""Code about a pretrained model before its weights are loaded: its family, files, tokenizer and name on the hub."""
