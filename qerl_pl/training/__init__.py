"""Parts of a policy update: passes over a rollout's completions, terms of the loss, metrics, and the optimizer."""
