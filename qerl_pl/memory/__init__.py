"""GPU memory of a run: predict it, choose settings with which the run fits, and repeat training passes that ran out of
memory with settings that need less."""
