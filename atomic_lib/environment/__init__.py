# SPDX-License-Identifier: Apache-2.0
"""What must hold on a machine before the first `import jax`: packages, platform, libtpu.

    requirements   which lines of requirements.txt the installed packages do not satisfy
    facts          what kind of session this is, found without loading a driver or jax
    plan           what to do about it, a pure function of those facts
    prepare        does it

Standard library and `packaging` only. jax reads its environment variables and loads libtpu once,
at its first use, so everything here has to happen earlier.
"""

from atomic_lib.environment.facts import Facts, accelerator_present, gather_facts
from atomic_lib.environment.plan import Plan, accelerator_refusal, backend_refusal, decide
from atomic_lib.environment.prepare import prepare_environment, require_loaded_libtpu
from atomic_lib.environment.requirements import unmet_requirements

__all__ = [
    "Facts",
    "Plan",
    "accelerator_present",
    "accelerator_refusal",
    "backend_refusal",
    "decide",
    "gather_facts",
    "prepare_environment",
    "require_loaded_libtpu",
    "unmet_requirements",
]
