"""What every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kvgen", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("kvgen")
