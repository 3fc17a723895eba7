"""The base's folder before anything is loaded: is it complete, which bytes is it, can its tokenizer be used."""
