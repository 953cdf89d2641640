"""The public surface is `vertumnus.__all__`: nothing appears or disappears unnoticed."""

import subprocess
import sys

import vertumnus

PUBLIC = [
    "POLICIES",
    "Composition",
    "ConfigError",
    "ControlPlane",
    "ControlPlaneSettings",
    "Discipline",
    "Placement",
    "PlacementPolicy",
    "PlacementView",
    "Profile",
    "SimulationResult",
    "SimulationSettings",
    "Slo",
    "Trace",
    "TraceError",
    "VertumnusError",
    "VertumnusPolicy",
    "analyze",
    "choose",
    "compare",
    "load_profile",
    "make_policy",
    "read_trace",
    "simulate",
    "synthesise",
    "write_profile",
    "write_trace",
]


def test_public_names_are_these():
    assert vertumnus.__all__ == PUBLIC


def test_every_public_name_can_be_had_and_knows_its_module():
    for name in vertumnus.__all__:
        value = getattr(vertumnus, name)
        assert getattr(value, "__module__", "vertumnus").startswith("vertumnus")


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, vertumnus; print(sorted({'numpy', 'scipy', 'matplotlib', 'rich'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
