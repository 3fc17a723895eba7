"""The parts of an update: passes over a batch, what the loss takes from all of it, metrics, the optimizer."""
