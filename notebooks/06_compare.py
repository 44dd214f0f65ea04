# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Compare architectures
#
# Baseline and hybrid at the steps that every run evaluated: mean and sample SD over seeds, tokens and time to target, and differences between runs with the same seeds. Nothing here is a confidence interval, and equal tokens are not equal FLOPs.
#
# | | |
# |---|---|
# | needs | finished training runs in `outputs/` |
# | wall time | half a minute |
# | quota | none: a CPU is enough |
# | inputs | `outputs/train_baseline-*/`, `outputs/train_hybrid-*/` |
# | outputs | `outputs/compare-<run>/comparison.json`, figures |

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
# `run` chooses the parameter file `params/compare/<run>.yaml`. `None` means "as in that file"; any other value replaces it. Any field of `atomic_lib.config.CompareConfig` may be added here; an unknown name or an impossible value is refused in the next cell.

# %% tags=["parameters"]
run: str = "smoke"  # "smoke" or "seeds"
baseline: list = None  # Baseline runs, one a seed, as folder names under outputs/
hybrid: list = None  # hybrid runs, likewise
targets: list = None  # estimated bits per byte whose first crossing is reported

# %%
loaded = session.read_parameters("compare", globals())
config = loaded.config

# %% [markdown]
# ## Run folder
# `manifest.json` records every parameter with its origin, the code, the packages and the devices. The result of an earlier run with this name is removed first.

# %%
from atomic_lib.notebook import show_manifest

run_folder = session.start_run(loaded)
show_manifest(run_folder)

# %% [markdown]
# ## At the last common step

# %%
from atomic_lib.compare import compare
from atomic_lib.notebook import show_table

comparison = compare(run_folder, config)
show_table(comparison.final_rows(), caption="Validation bits per byte")

# %%
show_table(comparison.pair_rows(), caption="Runs with the same seeds")

# %% [markdown]
# ## Learning curves

# %%
from atomic_lib.notebook import learning_curves, show_figure

figure = learning_curves(comparison.learning_curves(), measure="bpb_exact")
show_figure(run_folder, "learning_curves", figure)

# %% [markdown]
# ## Tokens and time to target
# The first logged evaluation at or under the target, per run, then averaged; the evaluation interval limits how fine this is.

# %%
show_table(comparison.target_rows(), caption="To target")

# %% [markdown]
# ## Evidence
# `SUCCESS.json` is written last, with the hash of every file. Unzip the download anywhere and run `python verify.py` in it: it needs nothing but Python.

# %%
from atomic_lib.notebook import offer_zip

run_folder.succeed(stop_reason="completed", **comparison.summary())
offer_zip(run_folder)
