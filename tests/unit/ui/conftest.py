"""The browser for tests of the live page."""

from tests.support.browser import browser

__all__ = ["browser"]
