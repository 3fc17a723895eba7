"""Rewards: what a completion is worth."""
