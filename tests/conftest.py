"""For all tests: hypothesis takes the time that a loaded machine needs."""

from hypothesis import HealthCheck, settings

settings.register_profile("fusewire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fusewire")
