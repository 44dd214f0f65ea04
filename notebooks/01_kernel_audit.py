# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Kernel audit
#
# The GDN-2 operation against its token-by-token recurrence in float64: outputs and every gradient, on easy inputs and on those where published kernels go wrong. Then causality to the bit, split runs, measured times on this device, and, where asked for, what the TPU compiler makes of the kernels beside those of PyPI `atomic-ops`.
#
# | | |
# |---|---|
# | needs | any machine; the schedules need libtpu (Linux, x86-64) and no TPU |
# | wall time | `smoke` about a minute on 2 cores; `full` was not timed: it compiles eight programs for the TPU |
# | quota | none |
# | inputs | none: inputs are generated |
# | outputs | `outputs/kernel_audit-<run>/`: accuracy.json, identities.json, timing.json, schedules.json, figures |

# %% [markdown]
# Finds the repository (here, above, just below, or attached to a Kaggle session), checks the packages before JAX is imported, and starts the budget's clock.

# %%
import sys
from pathlib import Path

here, attached = Path.cwd(), Path("/kaggle/input")
_places = [here, *here.parents, *here.glob("*")]
_places += [*attached.glob("*"), *attached.glob("datasets/*/*")]
root = next((place for place in _places if (place / "atomic_lib" / "__init__.py").is_file()), None)
if root is None:
    raise FileNotFoundError(f"no atomic_lib at, above or just below {here}: clone or attach it")
sys.path[:0] = [str(root)]
from atomic_lib.notebook import Session

session = Session.begin(root)

# %% [markdown]
# ## Parameters
# `run` chooses the parameter file `params/kernel_audit/<run>.yaml`. `None` means "as in that file"; any other value replaces it. Any field of `atomic_lib.config.KernelAuditConfig` may be added here; an unknown name or an impossible value is refused in the next cell.

# %% tags=["parameters"]
run: str = "smoke"  # "smoke" or "full"
sequence_length: int = None  # tokens, of the checks and of the timed calls
head_dim: int = None  # of keys and values
batch_size: int = None  # sequences, of the timed calls
heads: int = None  # of the timed calls
repeats: int = None  # timed calls of each function
compile_for_tpu: bool = None  # compile for TPU v5e on this CPU and read the schedules

# %%
loaded = session.read_parameters("kernel_audit", globals())
config = loaded.config

# %% [markdown]
# ## Run folder
# `manifest.json` records every parameter with its origin, the code, the packages and the devices. The result of an earlier run with this name is removed first.

# %%
from atomic_lib.notebook import show_manifest

run_folder = session.start_run(loaded)
show_manifest(run_folder)

# %% [markdown]
# ## Accuracy
# Relative root mean square error against the float64 recurrence and its derivative, the worst over all inputs. Operand rounding is the matrix unit's, also on a CPU. Rows that miss their limit stay in the table.

# %%
from atomic_lib.kernel_audit import audit_accuracy
from atomic_lib.notebook import show_table

accuracy = audit_accuracy(run_folder, config)
show_table(accuracy, caption="Worst error of each quantity")

# %%
from atomic_lib.notebook import accuracy_figure, show_figure

show_figure(run_folder, "accuracy", accuracy_figure(run_folder.read_json("accuracy.json")))

# %% [markdown]
# ## Causality and split runs
# Outputs up to a cut must not change by one bit when everything after it does; a run in two parts, the state handed over, must equal the whole.

# %%
from atomic_lib.kernel_audit import audit_identities

show_table(audit_identities(run_folder, config), caption="Identities")

# %% [markdown]
# ## Times on this device

# %%
from atomic_lib.kernel_audit import audit_times

show_table(audit_times(run_folder, config), caption="Measured here")

# %% [markdown]
# ## Static schedules for TPU v5e
# Bundles of the compiled program at the chip's clock: a deterministic lower bound, not a measurement on a TPU.

# %%
from atomic_lib.kernel_audit import audit_schedules

show_table(audit_schedules(run_folder, config), caption="Compiled for v5e")

# %% [markdown]
# ## Evidence
# `SUCCESS.json` is written last, with the hash of every file. Unzip the download anywhere and run `python verify.py` in it: it needs nothing but Python.

# %%
from atomic_lib.kernel_audit import require_passed
from atomic_lib.notebook import offer_zip

run_folder.succeed(stop_reason="completed", **require_passed(run_folder))
offer_zip(run_folder)
