"""Memory of a run: predict it, choose settings that fit the GPU, and go on with less when memory runs out."""
