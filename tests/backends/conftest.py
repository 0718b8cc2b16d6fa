"""Failures inside the shared contract are explained like those in a test module."""

import pytest

pytest.register_assert_rewrite("tests.backends.contract", "tests.backends.limits_rig", "tests.backends.payloads")
