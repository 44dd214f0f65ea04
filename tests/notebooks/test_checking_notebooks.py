# SPDX-License-Identifier: Apache-2.0
"""Protects: the notebooks that check a machine and the kernels leave evidence that verifies.

They need nothing from the training notebooks, so these files can run side by side.
"""

import pytest

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", ["preflight", "kernel_audit"])
def test_the_smoke_run_passes_and_verifies(name, run_smoke):
    run_smoke(name)
