"""The browser that is installed."""

from __future__ import annotations

import os
import shutil

from playwright.sync_api import Browser, Playwright


def installed() -> str | None:
    """Where Chromium is, None if it is not installed."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def launched(playwright: Playwright) -> Browser:
    """Chromium without a window."""
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox needs another user
    return playwright.chromium.launch(executable_path=installed(), args=as_root)
