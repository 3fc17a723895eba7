"""Lightning callbacks: noise, statistics, checks, checkpoints."""
