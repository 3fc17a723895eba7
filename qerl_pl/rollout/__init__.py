"""Rollouts: engines that sample completions from the policy, and the loop that samples, scores and turns completions
into training data."""
