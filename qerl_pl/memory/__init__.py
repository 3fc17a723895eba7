"""GPU memory of a run: predict it, choose settings with which the run fits, and repeat training passes with settings
that need less when memory runs out."""
