"""Commands: python -m qerl_pl COMMAND."""
