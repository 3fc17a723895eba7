"""Sources of training and evaluation problems, and the data module that turns the problems into batches of prompts."""
