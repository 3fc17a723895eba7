"""The parts of a policy update: passes over a batch, quantities of the loss that need all of it, metrics, the
optimizer."""
