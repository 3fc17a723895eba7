"""For all tests."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # a loaded machine is not a failure
settings.load_profile("no deadline")
