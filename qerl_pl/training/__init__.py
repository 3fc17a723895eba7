"""Parts of a policy update: forward and backward passes over a batch, quantities of the loss that are computed from the
whole batch, metrics, and the optimizer."""
