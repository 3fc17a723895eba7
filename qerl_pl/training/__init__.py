"""Functions and classes for one policy update: forward and backward passes over a batch, quantities of the loss that
need the whole batch, metrics, and the optimizer."""
