"""Rollouts: engines that sample completions, and the loop that scores them and turns them into training data."""
