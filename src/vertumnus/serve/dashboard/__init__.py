"""The dashboard's page: hand-written files, served as they are."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""For `HttpConfig.dashboard_folder`."""
