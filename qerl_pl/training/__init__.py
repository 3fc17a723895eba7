"""Functions and classes for one policy update: forward and backward passes over the completions of a rollout, masks and
divisors of the loss that depend on all of them, metrics, and the optimizer."""
