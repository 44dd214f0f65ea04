# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Evaluate exported models
#
# Bits per byte of the exported weights on the validation split: the estimate of the published runs (cross-entropy / ln 2 / 4.2) and the exact value, from the bytes of every target token. Each model must repeat its trainer's last evaluation.
#
# | | |
# |---|---|
# | needs | an export run in `outputs/` |
# | wall time | `smoke` half a minute; full size was not timed |
# | quota | none at smoke size |
# | inputs | `outputs/export-<run>/` and the corpus of the training runs |
# | outputs | `outputs/evaluate-<run>/evaluation.json`, figures |

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
# `run` chooses the parameter file `params/evaluate/<run>.yaml`. `None` means "as in that file"; any other value replaces it. Any field of `atomic_lib.config.EvaluateConfig` may be added here; an unknown name or an impossible value is refused in the next cell.

# %% tags=["parameters"]
run: str = "smoke"  # "smoke" or "seeds"
source: str = None  # the export run, as a folder name under outputs/
batch_size: int = None  # sequences
eval_batches: int = None  # None: the windows of the trainer's last evaluation

# %%
loaded = session.read_parameters("evaluate", globals())
config = loaded.config

# %% [markdown]
# ## Run folder
# `manifest.json` records every parameter with its origin, the code, the packages and the devices. The result of an earlier run with this name is removed first.

# %%
from atomic_lib.notebook import show_manifest

run_folder = session.start_run(loaded)
show_manifest(run_folder)

# %% [markdown]
# ## Bits per byte

# %%
from atomic_lib.evaluate import evaluate
from atomic_lib.notebook import show_table

evaluations = evaluate(run_folder, config, root=session.root)
show_table(evaluations, caption="Exported weights on the validation split")

# %% [markdown]
# ## Loss by position
# A token late in its window has more context to be predicted from.

# %%
from atomic_lib.notebook import position_curves, show_figure

evaluation = run_folder.read_json("evaluation.json")
show_figure(run_folder, "position_loss", position_curves(evaluation))

# %% [markdown]
# ## Evidence
# `SUCCESS.json` is written last, with the hash of every file. Unzip the download anywhere and run `python verify.py` in it: it needs nothing but Python.

# %%
from atomic_lib.notebook import offer_zip

run_folder.succeed(stop_reason="completed", models=len(evaluations), evaluations=evaluations)
offer_zip(run_folder)
