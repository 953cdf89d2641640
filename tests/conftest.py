"""What every test runs under: Hypothesis without deadlines, and the same examples each time where CI is set."""

import os

from hypothesis import HealthCheck, settings

# No deadline: the first example of a test pays for imports, and a busy machine must not fail a law.
settings.register_profile("laptop", deadline=None, max_examples=50)
settings.register_profile(
    "ci",
    parent=settings.get_profile("laptop"),
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", parent=settings.get_profile("laptop"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "laptop"))
