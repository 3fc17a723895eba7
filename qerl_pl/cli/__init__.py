"""The command line of the training commands: LightningCLI with configurations of this package by name, and short error
messages."""
