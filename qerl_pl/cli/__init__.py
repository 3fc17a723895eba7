"""The command line: LightningCLI, shipped configurations by name, and errors that fit on a screen."""
