"""How the whole suite runs hypothesis: the same examples every time, and no deadline on a shared machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
