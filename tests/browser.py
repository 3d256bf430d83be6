"""The installed browser."""

from __future__ import annotations

import os
import shutil

from playwright.sync_api import Browser, Playwright


def installed() -> str | None:
    """Return the path of Chromium or Chrome, or None if neither is installed."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def launched(playwright: Playwright) -> Browser:
    """Launch Chromium without a window."""
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # the sandbox does not run as root
    return playwright.chromium.launch(executable_path=installed(), args=as_root)
