"""Rollouts: engines that sample from the policy, and the loop that turns scored completions into training data."""
