"""What all tests share: property tests have no time limit of their own (pytest's timeout bounds them): time is a benchmark."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
