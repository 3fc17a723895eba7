"""The command line of the training commands: LightningCLI with shipped configurations by name, and short errors."""
