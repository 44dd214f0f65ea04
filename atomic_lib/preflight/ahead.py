# SPDX-License-Identifier: Apache-2.0
"""The ahead-of-time report in a preflight run: the step compiled for a TPU that is not here."""

from typing import Any

from atomic_lib.aot import AotUnavailableError, compile_report
from atomic_lib.config import TrainConfig
from atomic_lib.evidence import RunFolder

AHEAD_OF_TIME = "ahead-of-time.json"


def compile_ahead_of_time(
    run: RunFolder, config: TrainConfig, *, topology: str | None
) -> list[dict[str, Any]]:
    """Compiles `config` for the slice `topology` ("v5e-8") and writes ahead-of-time.json.

    Returns the report as table rows; one row that says why where nothing was compiled: topology
    None, or no matching TPU compiler on this machine. Raises RuntimeError with what would help if
    the run does not fit, and what `compile_report` raises; each leaves FAILED.json.
    """
    if topology is None:
        return [_skipped('not asked for; set topology, e.g. "v5e-8"')]
    with run.recording():
        try:
            report = compile_report(
                config,
                topology=topology,
                progress=lambda text: run.progress("ahead of time", 0, 0, text),
            )
        except AotUnavailableError as error:
            return [_skipped(str(error))]
        run.write_json(AHEAD_OF_TIME, report.to_dict())
        if not report.fits:
            raise RuntimeError(f"{config.preset} on {report.target} {report.verdict}")
    return report.rows()


def _skipped(reason: str) -> dict[str, Any]:
    return {"quantity": "ahead-of-time compile", "value": "skipped", "basis": reason}
