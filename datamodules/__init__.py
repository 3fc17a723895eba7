"""Sources of problems, and the data module that serves them as prompts."""
