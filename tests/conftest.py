"""For all tests: a busy machine must not fail one for being slow, so hypothesis gets no deadline."""

from hypothesis import settings

settings.register_profile("decodegate", deadline=None)
settings.load_profile("decodegate")
