"""For all tests: hypothesis gets no deadline, since a busy machine must not fail one for being slow, and in CI the same
examples every time, since a change is not to blame for what it did not touch. Look for new ones at your desk."""

import os

from hypothesis import settings

settings.register_profile("decodegate", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("decodegate")
