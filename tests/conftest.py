"""Markers and warnings for the whole suite. No platform is chosen here: JAX_PLATFORMS stays the caller's."""

from __future__ import annotations

import collections

import pytest


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "nightly: free shapes and long runs; selected with -m nightly, skipped otherwise"
    )
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; skipped where jax sees none")
    # A warning of ours, or a deprecation that our calls trigger, is a defect. Other packages' are theirs.
    config.addinivalue_line("filterwarnings", "error:::jax_turboattn")
    config.addinivalue_line("filterwarnings", "error::DeprecationWarning:jax_turboattn")


def pytest_collection_modifyitems(config, items):
    marked = config.getoption("-m") or ""
    for item in items:
        if item.get_closest_marker("nightly") and "nightly" not in marked:
            item.add_marker(pytest.mark.skip(reason="nightly: run with -m nightly"))
        if item.get_closest_marker("gpu") and not _gpu():
            item.add_marker(pytest.mark.skip(reason="gpu: jax sees no GPU"))


def pytest_terminal_summary(terminalreporter):
    """What conformance tests record: the calls that an implementation declined, none passed over in silence; how many
    random cases there were."""
    declined, drawn = collections.defaultdict(dict), collections.Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, recorded in report.user_properties:
            if name == "declined":
                implementation, reason, spec = recorded
                declined[implementation, reason][spec] = None
            elif name == "drawn":
                implementation, count = recorded
                drawn[implementation] += count
    if declined:
        terminalreporter.section("calls that were declined, each with NotImplementedError")
    for (implementation, reason), specs in sorted(declined.items()):
        names = ", ".join(specs)
        shown = names if len(names) <= 400 else names[:400] + " ..."
        terminalreporter.write_line(f"{implementation}: {reason}: {len(specs)} specs: {shown}")
    for implementation, count in sorted(drawn.items()):
        terminalreporter.write_line(f"{implementation}: {count} random cases")


def _gpu() -> bool:
    import jax

    return any(device.platform == "gpu" for device in jax.devices())
